"""PLAIN and SCRAM: the RFCs' own examples, both halves against each other, and what an attacker may try."""

from __future__ import annotations

import base64
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace import rng as rng_
from tailrace.errors import LoginError, UsageError
from tailrace.protocol import sasl
from tailrace.wire.codes import Status

SCRAM = [name for name in sasl.MECHANISMS if name != "PLAIN"]

# RFC 5802 section 5 and RFC 7677 section 3: user "user", password "pencil", 4096 iterations
RFC = {
    "SCRAM-SHA1": (
        b"fyko+d2lbbFgONRv9qkxdawL",
        b"r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
        b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        b"v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    ),
    "SCRAM-SHA256": (
        b"rOprNGfwEbeRWgbNEkqO",
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ),
}


class Fixed(random.Random):
    """A source that gives the bytes of a worked example."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self.data = data

    def randbytes(self, n: int) -> bytes:
        return self.data


def rfc_client(mechanism: str) -> sasl.ScramClient:
    return sasl.ScramClient(mechanism, "user", "pencil", Fixed(base64.b64decode(RFC[mechanism][0])))


@pytest.mark.parametrize("mechanism", RFC)
def test_client_computes_the_rfc_example(mechanism: str) -> None:
    nonce, challenge, client_final, server_final = RFC[mechanism]
    client = rfc_client(mechanism)
    assert client.start() == b"n,,n=user,r=" + nonce
    assert client.step(challenge) == client_final
    client.finish(server_final)


@pytest.mark.parametrize("mechanism", RFC)
def test_server_computes_the_rfc_example(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nonce, challenge, client_final, server_final = RFC[mechanism]
    attributes = dict(part.split(b"=", 1) for part in challenge.split(b","))
    monkeypatch.setattr(rng_, "nonce", lambda _: attributes[b"r"][len(nonce) :])
    monkeypatch.setattr(sasl.Users, "salt", lambda *_: base64.b64decode(attributes[b"s"]))
    source = random.Random(0)
    server = sasl.SaslServer(sasl.Users({"user": "pencil"}, source), source)
    answer = server.auth(mechanism.encode(), b"n,,n=user,r=" + nonce)
    assert answer == (Status.AUTH_CONTINUE, challenge)
    assert server.username is None
    assert server.step(mechanism.encode(), client_final) == (Status.SUCCESS, server_final)
    assert server.username == "user"


def server_with(**passwords: str) -> sasl.SaslServer:
    return sasl.SaslServer(sasl.Users(passwords, random.Random(1), iterations=1_000), random.Random(2))


def login(server: sasl.SaslServer, client: sasl.SaslClient) -> bool:
    """The whole exchange; False if the server refuses."""
    name = client.mechanism.encode()
    answer = server.auth(name, client.start())
    if answer.status == Status.AUTH_CONTINUE:
        answer = server.step(name, client.step(answer.value))
    if answer.status != Status.SUCCESS:
        assert answer == (Status.AUTH_ERROR, b"")
        assert server.username is None
        return False
    client.finish(answer.value)
    return True


text = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=20)


@settings(deadline=None, max_examples=60)
@given(mechanism=st.sampled_from(sasl.MECHANISMS), user=text, password=text, other=text, seed=st.integers())
def test_both_halves_agree_for_any_name_and_password(
    mechanism: str, user: str, password: str, other: str, seed: int
) -> None:
    server = server_with(**{user: password})
    rng = random.Random(seed)
    assert login(server, sasl.client_for(mechanism, user, password, rng))
    assert server.username == user
    assert login(server, sasl.client_for(mechanism, user, other, rng)) == (other == password)
    assert login(server, sasl.client_for(mechanism, other, password, rng)) == (other == user)


@pytest.mark.parametrize("mechanism", SCRAM)
def test_nonce_with_blanks_as_the_cpp_core_sends_it(mechanism: str) -> None:
    server = server_with(ada="secret")
    nonce = b"0x1e 0xffffff8f 0x0a"
    client = sasl.ScramClient(mechanism, "ada", "secret", random.Random(0))
    client._nonce = nonce
    client._first_bare = b"n=ada,r=" + nonce
    assert login(server, client)


@pytest.mark.parametrize("mechanism", SCRAM)
def test_unknown_user_looks_like_a_known_one(mechanism: str) -> None:
    server = server_with(ada="secret")
    first = b"n,,n=%b,r=abc"

    def salt_of(user: bytes) -> bytes:
        status, challenge = server.auth(mechanism.encode(), first % user)
        assert status == Status.AUTH_CONTINUE
        return challenge.split(b",")[1]

    assert salt_of(b"ada") == salt_of(b"ada")
    assert salt_of(b"bob") == salt_of(b"bob")
    assert salt_of(b"bob") != salt_of(b"eve")
    assert len(salt_of(b"ada")) == len(salt_of(b"bob"))


def calls_made(act: Callable[[], object]) -> Counter[str]:
    """Every function that is called, in Python and in C, and how often."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(function, "__qualname__", repr(function))] += 1

    gc.disable()  # a collection calls its callbacks
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def attempt(server: sasl.SaslServer, mechanism: str, user: str) -> None:
    """A login with a wrong password, as far as it goes."""
    client = sasl.client_for(mechanism, user, "wrong", random.Random(3))
    name, first = mechanism.encode(), client.start()
    answer = server.auth(name, first)
    if answer.status == Status.AUTH_CONTINUE:
        # a proof of the right form costs the server the same as the client's, and no derivation here
        nonce = answer.value.split(b",")[0]
        size = {"SCRAM-SHA1": 20, "SCRAM-SHA256": 32, "SCRAM-SHA512": 64}[mechanism]
        server.step(name, b"c=biws," + nonce + b",p=" + base64.b64encode(bytes(size)))


@pytest.mark.parametrize("mechanism", sasl.MECHANISMS)
@pytest.mark.parametrize("attempts_before", [0, 1, 5])
def test_the_work_is_the_same_for_a_known_name_and_an_unknown_one(
    mechanism: str, attempts_before: int
) -> None:
    work = []
    for user in ("ada", "bob"):
        server = server_with(ada="secret", eve="other")
        for _ in range(attempts_before):
            attempt(server, mechanism, user)
        work.append(calls_made(partial(attempt, server, mechanism, user)))
    known, unknown = work
    assert known == unknown
    assert sum(known.values()) > 10


def test_no_login_derives_keys_once_they_are_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    users = sasl.Users({"ada": "secret"}, random.Random(1), iterations=1_000)
    users.derive()
    monkeypatch.setattr(sasl.Credential, "derive", lambda *_: pytest.fail("keys are derived in a login"))
    for mechanism in sasl.MECHANISMS:
        for user in ("ada", "bob"):
            attempt(sasl.SaslServer(users, random.Random(2)), mechanism, user)


def challenge_of(
    client: sasl.ScramClient, *, extend: bytes = b"x", salt: bytes = b"c2FsdA==", i: bytes = b"4096"
) -> bytes:
    return b"r=" + client._nonce + extend + b",s=" + salt + b",i=" + i


@pytest.mark.parametrize("mechanism", SCRAM)
@pytest.mark.parametrize(
    "cheat",
    [
        {"extend": b""},
        {"i": b"1"},
        {"i": b"999"},
        {"i": b"0"},
        {"i": b"-4096"},
        {"i": b"2147483648"},
        {"i": b"1000001"},
        {"i": b"9" * 4000},
        {"i": b"4_096"},
        {"i": b"\xd9\xa4\xd9\xa0"},
        {"i": b" 4096"},
        {"i": b"4096,x=1"},
        {"i": b""},
        {"salt": b""},
        {"salt": b"c2Fs dA=="},
        {"salt": b"A" * 3000},
    ],
)
def test_server_first_that_cheats_gets_no_proof(mechanism: str, cheat: dict[str, bytes]) -> None:
    client = sasl.ScramClient(mechanism, "ada", "secret", random.Random(0))
    client.start()
    with pytest.raises(LoginError):
        client.step(challenge_of(client, **cheat))


@pytest.mark.parametrize(
    "challenge",
    [b"", b"r=", b"m=x,r=1,s=c2FsdA==,i=4096", b"s=c2FsdA==,r=1,i=4096", b"r=other,s=c2FsdA==,i=4096"],
)
def test_server_first_in_another_form_is_refused(challenge: bytes) -> None:
    client = rfc_client("SCRAM-SHA256")
    with pytest.raises(LoginError):
        client.step(challenge)


@pytest.mark.parametrize(
    "final", [b"", b"v=", b"v=AAAA", b"v=!!", b"e=other-error", RFC["SCRAM-SHA256"][3] + b"x", b"x=1"]
)
def test_server_that_can_not_prove_itself_is_refused(final: bytes) -> None:
    client = rfc_client("SCRAM-SHA256")
    client.step(RFC["SCRAM-SHA256"][1])
    with pytest.raises(LoginError):
        client.finish(final)


def test_success_before_the_challenge_is_refused() -> None:
    with pytest.raises(LoginError):
        rfc_client("SCRAM-SHA256").finish(RFC["SCRAM-SHA256"][3])


def test_second_challenge_is_refused() -> None:
    client = rfc_client("SCRAM-SHA256")
    client.step(RFC["SCRAM-SHA256"][1])
    with pytest.raises(LoginError):
        client.step(RFC["SCRAM-SHA256"][1])


@settings(deadline=None)
@given(
    mechanism=st.one_of(st.sampled_from([name.encode() for name in sasl.MECHANISMS]), st.binary(max_size=20)),
    steps=st.lists(st.tuples(st.booleans(), st.binary(max_size=60)), max_size=4),
)
def test_any_bytes_from_a_client_are_refused_and_never_raise(
    mechanism: bytes, steps: list[tuple[bool, bytes]]
) -> None:
    server = server_with(ada="secret")
    for is_first, value in steps:
        answer = (server.auth if is_first else server.step)(mechanism, value)
        assert answer.status in (Status.AUTH_ERROR, Status.EINVAL, Status.AUTH_CONTINUE)
        assert server.username is None


@pytest.mark.parametrize(
    "final",
    [
        b"c=eSws,r=%b,p=%b",  # another channel binding header than in the first message
        b"c=biws,r=x%b,p=%b",
        b"r=%b,c=biws,p=%b",
        b"c=biws,r=%b,p=%b,x=1",
        b"c=biws,r=%b,q=%b",
    ],
)
def test_client_final_in_another_form_is_refused(final: bytes) -> None:
    server = server_with(ada="secret")
    client = sasl.ScramClient("SCRAM-SHA256", "ada", "secret", random.Random(0))
    challenge = server.auth(b"SCRAM-SHA256", client.start()).value
    _, nonce, proof = client.step(challenge).split(b",")
    assert server.step(b"SCRAM-SHA256", final % (nonce[2:], proof[2:])) == (Status.AUTH_ERROR, b"")
    assert server.username is None


def test_a_proof_is_good_once_and_for_its_mechanism() -> None:
    server = server_with(ada="secret")
    client = sasl.ScramClient("SCRAM-SHA256", "ada", "secret", random.Random(0))
    final = client.step(server.auth(b"SCRAM-SHA256", client.start()).value)
    assert server.step(b"SCRAM-SHA512", final).status == Status.AUTH_ERROR
    assert server.step(b"SCRAM-SHA256", final).status == Status.EINVAL
    assert server.auth(b"SCRAM-SHA256", client.start()).status == Status.AUTH_CONTINUE
    assert server.step(b"SCRAM-SHA256", final).status == Status.AUTH_ERROR  # another nonce


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"\0ada\0secret", Status.SUCCESS),
        (b"ada\0ada\0secret", Status.SUCCESS),
        (b"root\0ada\0secret", Status.AUTH_ERROR),
        (b"\0ada\0secret\0", Status.AUTH_ERROR),
        (b"\0ada\0", Status.AUTH_ERROR),
        (b"\0\0", Status.AUTH_ERROR),
        (b"ada\0secret", Status.AUTH_ERROR),
        (b"\0\xff\0secret", Status.AUTH_ERROR),
        (b"\0ada\0" + b"x" * sasl.MAX_MESSAGE, Status.AUTH_ERROR),
    ],
)
def test_plain(value: bytes, status: int) -> None:
    assert server_with(ada="secret").auth(b"PLAIN", value).status == status


def test_failed_attempt_takes_the_login_away() -> None:
    server = server_with(ada="secret")
    assert server.auth(b"PLAIN", b"\0ada\0secret").status == Status.SUCCESS
    assert server.auth(b"PLAIN", b"\0ada\0wrong").status == Status.AUTH_ERROR
    assert server.username is None


def test_plain_has_no_second_step() -> None:
    with pytest.raises(LoginError):
        sasl.PlainClient("ada", "secret").step(b"more")


def test_strongest_mechanism_is_chosen_and_plain_only_where_allowed() -> None:
    assert sasl.choose_mechanism(["PLAIN", "SCRAM-SHA1", "SCRAM-SHA512"], allow_plain=True) == "SCRAM-SHA512"
    assert sasl.choose_mechanism(["PLAIN", "SCRAM-SHA1"], allow_plain=False) == "SCRAM-SHA1"
    assert sasl.choose_mechanism(["PLAIN"], allow_plain=True) == "PLAIN"
    with pytest.raises(LoginError, match="TLS"):
        sasl.choose_mechanism(["PLAIN"], allow_plain=False)
    with pytest.raises(LoginError, match="CRAM-MD5"):
        sasl.choose_mechanism(["CRAM-MD5"], allow_plain=True)


def test_what_can_not_be_sent_is_a_usage_error() -> None:
    for make in (
        lambda: sasl.client_for("CRAM-MD5", "ada", "x", random.Random(0)),
        lambda: sasl.PlainClient("a\0da", "x"),
        lambda: sasl.ScramClient("SCRAM-SHA1", "", "x", random.Random(0)),
        lambda: sasl.Users({}, random.Random(0), iterations=1),
    ):
        with pytest.raises(UsageError):
            make()


def test_a_client_salts_a_password_once_for_all_connections() -> None:
    """Salting is slow on purpose. Each login still has its own proof."""
    sasl._salted_once.cache_clear()
    users = sasl.Users({"ada": "secret"}, random.Random(1))
    proofs = set()
    for number in range(3):
        server = sasl.SaslServer(users, random.Random(10 + number))
        client = sasl.client_for("SCRAM-SHA512", "ada", "secret", random.Random(20 + number))
        proof = client.step(server.auth(b"SCRAM-SHA512", client.start()).value)
        client.finish(server.step(b"SCRAM-SHA512", proof).value)
        assert server.username == "ada"
        proofs.add(proof)
    assert len(proofs) == 3
    assert sasl._salted_once.cache_info()[:2] == (2, 1)
