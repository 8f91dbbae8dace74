#!/usr/bin/env bash
# land: rebase on main, lint, ff-merge
set -e
cd /work/wt/server
git fetch -q . main && git rebase -q main
V=/work/main/.venv/bin
$V/ruff check -q src tests bench && $V/ruff format -q --check src tests bench && PYTHONPATH=src $V/mypy | tail -3
cd /work/main && git merge -q --ff-only server && git log --oneline | head -1
