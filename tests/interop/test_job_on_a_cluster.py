"""`examples/job.py` by spark-submit on a standalone cluster that shares only the table with the driver.

The workers have another working directory, another PATH and none of our folders: the driver's own, the
package's and the environment's programs are empty for them. What they run comes as an environment archive.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import tailrace.testing
from interop.spark_environment import ROOT
from spark.test_cluster import SETTINGS, cluster
from tailrace.spark.spark_session import prepare_environment

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]

PACKAGES = ("numpy", "obstore", "pandas", "pyarrow", "pyroaring", "python-dateutil", "pytz", "six", "tzdata")
"""What an executor needs apart from our package and the modules that Spark brings."""


def environment_archive(path: Path) -> Path:
    """What `venv-pack` makes of an environment with the package installed: it can be unpacked anywhere."""
    library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    base = Path(sys.base_prefix) / "bin" / "python3"
    config = path.with_name("pyvenv.cfg")
    config.write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(config, "pyvenv.cfg")
        for folder in ("bin", "lib", str(Path(library).parent), library):  # Spark makes no folder for a link
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        link = tarfile.TarInfo("bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, str(base)
        archive.addfile(link)
        for name in ("tailrace", "pyspark_tailrace"):
            archive.add(ROOT / "src" / name, f"{library}/{name}")
        for name in PACKAGES:
            try:
                files = distribution(name).files or []
            except PackageNotFoundError:
                continue
            for file in files:
                if ".." not in file.parts and "tests" not in file.parts and "include" not in file.parts:
                    archive.add(file.locate(), f"{library}/{file}")
    return path


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="this user may not make a mount namespace",
)
def test_the_job_where_only_the_table_is_shared(tmp_path: Path) -> None:
    import pyspark

    prepare_environment()
    driver, workers = tmp_path / "driver", tmp_path / "workers"
    driver.mkdir()
    workers.mkdir()
    archive = environment_archive(driver / "environment.tar.gz")
    hidden = [driver, ROOT / "src", Path(sys.executable).parent]
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"} | {
        "PYTHONPATH": str(ROOT / "src"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "HOME": str(driver),
        "TMPDIR": str(driver),
    }
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    with cluster(workers, hidden) as master, tailrace.testing.node(vbuckets=4) as node:
        for number in range(20):
            node.set(f"k{number}", {"n": number})
        command = [submit, "--master", master, *SETTINGS, "--archives", f"{archive}#environment"]
        command += ["--conf=spark.pyspark.python=./environment/bin/python"]
        command += [f"--conf=spark.pyspark.driver.python={sys.executable}"]
        command += [str(ROOT / "examples" / "job.py"), node.url, str(tmp_path / "table")]
        done = subprocess.run(
            command, env=environment, cwd=driver, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 documents, 20 rows, 0 differences" in done.stdout
