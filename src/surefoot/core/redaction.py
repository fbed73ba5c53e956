"""Removes what must not be written: passwords, tokens, keys, and the path of the user's home.

Everything that surefoot writes goes through one `Redactor`: run folders, events and the output of sinks, incidents,
exported scripts, report pages.

- Values of environment variables whose names indicate a secret (`HF_TOKEN`, `DB_PASSWORD`, `WANDB_API_KEY`) are removed
  wherever they occur, unless they are ordinary values: `1`, `true`, a version, a short word, a path.
- Values with such a name are removed: `--api-key VALUE`, `--token=VALUE`, `db.password=VALUE`, `"secret": "VALUE"`,
  `?access_token=VALUE`. Names of a language model's tokens (`pad_token`, `max_tokens`) are not secrets.
- User and password in an address (`https://user:password@host`), and text in the form of a well-known kind of token,
  such as `hf_…`, `ghp_…`, `AKIA…`, are removed.
- The path of the home becomes `~`.

An incident is made to be shared. In it, paths are also reduced to the file name, and the names of the user and of the
host are replaced (`identity=True`). Names of parameters and modules are not free text and are kept: without them
nothing could be run again. Not covered: secrets without any such sign (`-p VALUE`), and the output of the script
itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

REDACTED = "<redacted>"
Kind = Literal["", "weak", "token", "strong"]
"""How certain it is that a name belongs to a secret."""

_PASSWORDS = ("password", "passwd", "passphrase", "secret", "secrets", "apikey", "credential", "credentials")
_WEAK = {"key", "keys", "auth", "authorization", "cookie", "bearer", "pat", "pass", "pw", "pwd"}
_KEYS_OF_SECRETS = {
    "api", "access", "secret", "private", "account", "auth", "license", "licence", "signing", "encryption", "service",
    "subscription", "client", "master", "shared", "storage", "wandb", "openai", "anthropic",
}  # fmt: skip
"""`access_key` is a secret, `label_key` is a column of a table."""
_TOKENS_OF_MODELS = {
    "pad", "eos", "bos", "unk", "sep", "cls", "mask", "special", "max", "min", "num", "n", "per", "next", "last",
    "first", "end", "start", "stop", "image", "audio", "video", "text", "placeholder", "initializer", "trigger",
    "class", "concept", "decoder", "forced", "begin", "new", "unexpected", "each", "a", "the", "every", "one", "prefix",
    "suffix",
}  # fmt: skip
"""Words before `token` in the names of language models' settings."""
_IN_ADDRESS = {"key", "sig", "signature", "xamzsignature", "xamzcredential", "xamzsecuritytoken", "sas"}
_ORDINARY = {
    "", "password", "passwd", "changeme", "postgres", "default", "disabled", "enabled", "required", "optional", "none",
    "null", "true", "false", "yes", "no", "on", "off", "auto", "training", "validation", "testing", "localhost",
    "always", "never", "anonymous", "development", "production", "interactive", "read-only", "readonly", "implicit",
    "explicit", "transformer", "attention", "embedding", "gradient", "optimizer", "scheduler", "pytorch", "tensorboard",
}  # fmt: skip
_PEOPLE = {
    "root", "user", "users", "test", "tests", "runner", "admin", "train", "model", "models", "data", "docker", "dev",
    "work", "worker", "app", "host", "local", "localhost", "nobody", "main", "home", "ubuntu", "build", "master",
    "node", "torch", "python", "step", "loss", "batch", "layer", "linear", "nan", "inf",
}  # fmt: skip
"""Names of users and hosts that are common words in text about training."""

_PLAIN_VALUE = re.compile(
    r"[+-]?[\d._,]*\d(e[+-]?\d+)?[%kmgtb]{0,2}|v?\d+(\.\d+)+([.+-]?[a-z][\w.+-]*)?"
    r"|<[^>]*>|\[[^\]]*\]|\{[^}]*\}|\$\{\w+\}|\*+|x+",
    re.IGNORECASE,
)
"""Numbers, versions, placeholders such as `<pad>`, `${TOKEN}`, `****`."""
_ADDRESS_USER = re.compile(
    r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)"
    r"(?P<user>[^\s/?#@:\[\"'<>]*:(?!\d*[/?#])(?:(?!://)[^\s\"'<>])+|[^\s/?#\"'<>]+)@"
)
"""A password may contain `@` and `/`, so it ends at the last `@`; `host:8080/` is not a user."""
_HOST_USER = re.compile(
    r"(?<![\w/@.:<+-])[\w.+-]+:(?!\d{1,2}@|\d*\.\d+@)(?P<password>[^\s:/\"'<>]+)@(?=[A-Za-z0-9])(?!sha\d+:)"
)
"""Not a time (`10:30@home`), a small number (`gpu:0@rank1`) or the digest of an image (`name:tag@sha256:…`)."""
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-(?=[A-Za-z0-9_-]{0,40}\d)[A-Za-z0-9_-]{20,}"
    r"|xox[abeoprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}"
    r"|eyJ[\w-]{8,500}\.[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_AUTHORIZATION = re.compile(
    r"(?P<before>\bauthorization[\"']?\s*[:=]\s*[\"']?(?:basic|bearer|token|negotiate|ntlm|apikey)\s+)"
    r"(?P<value>[^\s\"',<>]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<before>\b(?:[Bb]earer|[Bb]asic)\s+)(?P<value>[A-Za-z0-9._~+/=-]{8,})")
_NAME = r"(?=[\w.-]*(?:pass|secret|token|key|auth|cookie|bearer|credential|pat|pw))(?P<name>[A-Za-z_][\w.-]*)"
_ASSIGNED = re.compile(
    rf"(?<![\w.])(?<![\w.]-){_NAME}(?P<before>[\"']?\s?(?P<sign>[=:])\s?[\"']?)"
    r"(?P<value>(?<=[\"'])[^\"'\n]+|[^\s\"'&,;<>(){}\[\]]+)",
    re.IGNORECASE,
)
_NAMED = re.compile(rf"(?<![\w.])(?<![\w.]-){_NAME}[\"']?\s?(?P<sign>[=:])\s?[\"']?", re.IGNORECASE)
_WHOLE_VALUE = re.compile(
    r"(?<=\")(?:\\.|[^\"\\\n])+|(?<=')(?:\\.|[^'\\\n])+|(?P<first>[^\s\"'&,;<>(){}\[\]]*)[^\s\"']*"
)
"""Up to a blank or a quote: a password may contain any other character."""
_QUERY = re.compile(r"(?P<mark>[?&])(?P<name>[A-Za-z_][\w.-]*)(?P<before>=)(?P<value>[^\s\"'&#<>]+)")
_OPTION = re.compile(r"(?<![\w-])--(?P<name>[A-Za-z][\w.-]*)(?P<before>\s+)(?P<value>(?!--)[^\s\"']+)")
_PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?(?:[/\\]{1,2}[^\s/\\:*?\"'<>|,;()\[\]{}]+){2,}[/\\]?")
_MEMORY = re.compile(r" at 0x[0-9a-fA-F]+")
_IS_NAME = re.compile(r"[-+]*[\w.-]+")
_NO_TEXT = frozenset((float, int, bool, type(None)))
"""Types of values without text: nearly everything that a run writes."""
_SHORTEST_NAME = 3
_LONGEST_CACHED = 400

_seen: dict[str, Kind] = {}
"""Secrets of the environment so far: many scripts delete one after use."""


class Redactor:
    """Removes secrets from text; with `active=False` it changes nothing."""

    def __init__(self, active: bool = True, identity: bool = True) -> None:
        """`identity`: also reduce paths to file names, and replace the names of user and host."""
        self._active, self._identity = active, identity
        self._known: dict[str, str] = {}
        if active:
            self._values = _secret_values()
            self._names = _names(identity)

    def __call__(self, text: str) -> str:
        """The redacted text."""
        if not self._active or not text:
            return text
        if text not in self._known:
            shown = self._redacted(text)
            if len(text) > _LONGEST_CACHED:
                return shown
            self._known[text] = shown
        return self._known[text]

    def _redacted(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(REDACTED, text)
        text = _KNOWN.sub(REDACTED, text)
        text = _ADDRESS_USER.sub(_without_user, text)
        text = _HOST_USER.sub(f"{REDACTED}@", text)
        text = _AUTHORIZATION.sub(rf"\g<before>{REDACTED}", text)
        text = _BEARER.sub(_without_bearer, text)
        text = _without_passwords(_QUERY.sub(_without_value, text))
        for pattern in (_ASSIGNED, _OPTION):
            text = pattern.sub(_without_value, text)
        if self._identity:
            text = _PATH.sub(_file_name, text)
        for pattern, word in self._names:
            text = pattern.sub(word, text)
        return _MEMORY.sub("", text) if self._identity else text

    def inside(self, value: Any) -> Any:
        """The same nesting with all text redacted, and values with the name of a secret removed."""
        if not self._active:
            return value
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {
                self._key(key): item if type(item) in _NO_TEXT else self._held(key, item) for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [item if type(item) in _NO_TEXT else self.inside(item) for item in value]
        return str(self(os.fspath(value))) if isinstance(value, Path) else value

    def _key(self, key: Any) -> Any:
        """Names of parameters are keys, so only paths and known secrets are removed from keys."""
        return self(key) if isinstance(key, str) and not self._identity else key

    def _held(self, key: Any, item: Any) -> Any:
        if isinstance(key, str) and isinstance(item, str):
            if _is_secret(_kind_of(key), item):
                return REDACTED
            if found := _AUTHORIZATION.search(f"{key}: {item}"):
                return found["before"].removeprefix(f"{key}: ") + REDACTED
        if key in ("arguments", "argv") and isinstance(item, (list, tuple)) and all(isinstance(w, str) for w in item):
            return self.arguments(item)
        return self.inside(item)

    def arguments(self, words: Sequence[str]) -> list[str]:
        """The arguments of a command, without those that are secrets."""
        if not self._active:
            return list(words)
        shown: list[str] = []
        kind: Kind = ""
        for word in words:
            name, equals, value = word.partition("=")
            is_name = _IS_NAME.fullmatch(name) is not None and (bool(equals) or word.startswith("-"))
            named = _kind_of(name.lstrip("-+")) if is_name else ""
            if kind and not (_is_option(word) and kind != "strong") and _is_secret(kind, word, given=True):
                shown.append(REDACTED)
            elif equals and _is_secret(named, value, given=True):
                shown.append(f"{name}={REDACTED}")
            else:
                shown.append(self(word))
            kind = named if word.startswith("-") and not equals else ""
        return shown

    def path(self, path: str) -> str:
        """The path relative to the current folder, if it is inside; otherwise the file name."""
        if not self._active:
            return path
        with suppress(ValueError, OSError):
            return self(str(Path(path).resolve().relative_to(Path.cwd().resolve())))
        return self(Path(path).name)


def is_redacted(text: str) -> bool:
    """Whether something was removed from a text."""
    return REDACTED in text


def is_secret_value(name: str, value: str) -> bool:
    """Whether a string that code assigns to a name is a secret."""
    return _is_secret(_kind_of(name), value, given=True)


# ---- names and values ------------------------------------------------------------------------------------------------


@cache
def _words_of(name: str) -> tuple[str, ...]:
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return tuple(word.lower() for word in re.split(r"[^A-Za-z0-9]+", apart) if word)


@cache
def _kind_of(name: str) -> Kind:
    """What the name of an option, an entry or a setting indicates about its value."""
    words = _words_of(name)
    if not words or name.upper() in ("PWD", "OLDPWD"):
        return ""
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last.endswith(_PASSWORDS):
        return "strong"
    if last in ("key", "keys"):
        return "strong" if before in _KEYS_OF_SECRETS else "weak"
    if last == "token" or (last.endswith("token") and last.removesuffix("token") not in _TOKENS_OF_MODELS):
        return "" if before in _TOKENS_OF_MODELS else "token"
    return "weak" if last in _WEAK else ""


def _is_secret(kind: Kind, value: str, given: bool = False) -> bool:
    """Whether to remove a value with a name of this kind; `given`: it is an argument, not prose."""
    if not kind or not value or REDACTED in value:
        return False
    if kind == "strong":
        return (given or not _is_ordinary(value)) and value.lower() not in ("none", "null", "true", "false")
    if kind == "token" and given:
        return not _is_ordinary(value)
    return _looks_random(value)


def _is_ordinary(value: str) -> bool:
    return value.lower() in _ORDINARY or _PLAIN_VALUE.fullmatch(value) is not None


def _looks_random(value: str) -> bool:
    """Whether a value is long enough, of letters and digits, and neither a number nor a path."""
    mixed = any(each.isdigit() for each in value) and any(each.isalpha() for each in value)
    is_long_word = len(value) >= 20 and value.isalnum()
    return len(value) >= 8 and (mixed or is_long_word) and not _is_ordinary(value) and not _is_path(value)


def _is_option(word: str) -> bool:
    """Whether a word after an option is another option: it begins with `-`, and does not look like a token."""
    is_token = not word.startswith("--") and "=" not in word.rstrip("=") and _looks_random(word)
    return word.startswith("-") and not is_token


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~", "./", "../")) or re.match(r"[A-Za-z]:[\\/]", value) is not None


def _kind_in_environment(name: str) -> Kind:
    """Like `_kind_of`, but with any word of the name: `AWS_SECRET_ACCESS_KEY_ID`, `TOKEN_GITHUB`."""
    words = _words_of(name)
    kinds = {_kind_of(name), *(_kind_of(word) for word in words)} - {""}
    if not kinds and any(part in word for word in words for part in ("token", "secret", "passw", "apikey")):
        kinds = {"token"} if not any(word.startswith(("tokeniz", "tokenis")) for word in words) else set()
    return next((kind for kind in ("strong", "token", "weak") if kind in kinds), "")


def _is_worth_redacting(kind: Kind, value: str) -> bool:
    """Whether the value of an environment variable is searched in all text: it must not be an ordinary one."""
    if not kind or _is_ordinary(value) or _is_path(value) or "://" in value:
        return False
    if kind == "weak":
        return _looks_random(value)
    return len(value) >= (8 if value.isalnum() and (value.isalpha() or value.isdigit()) else 6)


def _secret_values() -> re.Pattern[str] | None:
    """A pattern for the secrets of the environment, longest first."""
    for name, value in os.environ.items():
        value = value.strip()
        kind = _kind_in_environment(name)
        if _is_worth_redacting(kind, value):
            _seen[value] = kind
        for found in _ADDRESS_USER.finditer(value):
            whole = found["user"].partition(":")[2]
            for password in (unquote(whole), unquote(whole.partition("@")[0])):
                if _is_worth_redacting("strong", password):
                    _seen[password] = "strong"
    if not _seen:
        return None
    spelled = {each for value in _seen for each in (value, quote(value, safe=""))}
    patterns = [_whole(value) for value in sorted(spelled, key=len, reverse=True)]
    return re.compile("|".join(patterns))


def _whole(value: str) -> str:
    """A short or plain value counts only as a whole word: it may be a part of a longer one."""
    text = re.escape(value)
    return rf"(?<![A-Za-z0-9]){text}(?![A-Za-z0-9])" if len(value) < 12 or value.isalpha() or value.isdigit() else text


# ---- pieces of text --------------------------------------------------------------------------------------------------


def _without_user(found: re.Match[str]) -> str:
    keeps = found["user"] == "git" or REDACTED in found["user"]
    return found.group() if keeps else f"{found['scheme']}{REDACTED}@"


def _without_bearer(found: re.Match[str]) -> str:
    return f"{found['before']}{REDACTED}" if _looks_random(found["value"]) else found.group()


def _without_passwords(text: str) -> str:
    """Remove the values of names that certainly belong to secrets, with any characters."""
    shown, at = "", 0
    while named := _NAMED.search(text, at):
        end = named.end()
        shown += text[at:end]
        at = end
        value = _WHOLE_VALUE.match(text, end) if _kind_of(named["name"]) == "strong" else None
        if value is not None and _is_password(value.group(), value["first"], given=named["sign"] == "="):
            shown += REDACTED
            at = value.end()
    return shown + text[at:]


def _is_password(value: str, first: str | None, given: bool) -> bool:
    """`first`: the part before any punctuation. `None` in `f(password=None, …)` is not a password."""
    if value.startswith(REDACTED) or not any(each.isalnum() for each in value):
        return False
    if first == "" and value.endswith((",", "(", "[", "{")):  # the beginning of a list
        return False
    return _is_secret("strong", first, given) if first else _is_secret("strong", value)


def _without_value(found: re.Match[str]) -> str:
    kind = _kind_of(found["name"])
    if found.re is _QUERY and "".join(_words_of(found["name"])) in _IN_ADDRESS:
        kind = "token"
    # In prose ("unexpected token: foo"), only text that can hardly be a word is removed.
    is_prose = found.re is _ASSIGNED and found["sign"] == ":"
    if found.re is _OPTION and _is_option(found["value"]):
        return found.group()
    if not _is_secret(kind, found["value"], given=not is_prose):
        return found.group()
    return found.group()[: found.start("value") - found.start()] + REDACTED


def _file_name(found: re.Match[str]) -> str:
    return re.split(r"[/\\]", found.group().rstrip("/\\"))[-1]


# ---- user and host ---------------------------------------------------------------------------------------------------


def _names(identity: bool) -> list[tuple[re.Pattern[str], str]]:
    found = [
        (home, "~") for home in dict.fromkeys([os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))])
    ]
    found = [(home.rstrip("/\\"), word) for home, word in found if home != "~"]
    if identity:
        found += _user_and_host()
    return [
        (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)"), word) for name, word in found if len(name) >= _SHORTEST_NAME
    ]


def _user_and_host() -> list[tuple[str, str]]:
    import getpass
    import socket

    found: list[tuple[str, str]] = []
    with suppress(Exception):
        found.append((getpass.getuser(), "<user>"))
    with suppress(Exception):
        host = socket.gethostname()
        found += [(host, "<host>"), (host.split(".")[0], "<host>")]
    return [(name, word) for name, word in found if name.lower() not in _PEOPLE]
