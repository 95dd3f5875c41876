"""Machine translation by any OpenAI-compatible endpoint, a few texts a request, no faster than it allows."""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modeling_supclap.languages import get_language_name

logger = logging.getLogger(__name__)

INSTRUCTIONS = """\
You are a professional translator and a native speaker of {target}. You are given short descriptions of sounds that
can be heard in recordings, in {source}, as a JSON object with numbers for keys. Translate each into natural, idiomatic
{target}, as a native speaker would describe the sound: keep every sound, its order in time and its source, use the
usual words for sounds, add nothing and leave nothing out. Write {script}.
Answer with nothing but a JSON object that has the same keys and the translations as its values."""
_SCRIPTS = {"zho": "simplified Chinese characters"}

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # busy or broken for now; 529 is some providers' "overloaded"


class ChatTranslator:
    """A language model behind an OpenAI-compatible endpoint.

    A batch goes as one request, its texts numbered in a JSON object; an answer that has other numbers, or is no such
    object, is asked for once more, then the batch is asked for in halves. A text that fails alone is given up.
    A server that is busy or broken is tried again, after as long as it asks for or twice as long each time.

    Args:
        name: The model, as the endpoint calls it.
        endpoint: Its address, such as `https://api.deepseek.com/v1` or `http://localhost:8000`.
        api_key: Sent as a bearer token, if there is one.
        options: Further fields of the request.
        requests_per_minute: At most so many, evenly spaced; None for no limit.
        workers: Requests at a time.
        retries: How often a request is tried again.
        timeout_seconds: How long to wait for an answer.
        clock: Tells the seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        requests_per_minute: float | None = None,
        workers: int = 4,
        retries: int = 6,
        timeout_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self.url = completions_url(endpoint)
        self.api_key = api_key
        self.options = {"temperature": 0} if options is None else dict(options)
        self.workers = workers
        self.retries = retries
        self.timeout_seconds = timeout_seconds
        self.limiter = RateLimiter(requests_per_minute, clock, sleep)

    def check(self, source: str, target: str) -> None:
        """A language model may be asked for any language."""

    def translate(self, texts: Sequence[str], source: str, target: str) -> list[str]:
        """Translates a batch.

        Args:
            texts: Not blank.
            source: ISO 639-3 code of their language.
            target: ISO 639-3 code of the language wanted.

        Returns:
            The translations, "" where the model gave no usable one.

        Raises:
            ConnectionError: The endpoint could not be reached or was busy for all retries.
            PermissionError: It refuses the key.
            ValueError: It refuses the request.
        """
        for _ in range(2):
            try:
                return read_answer(self._post(self._request(texts, source, target)), len(texts))
            except UnusableAnswer as error:
                reason = error
        if len(texts) == 1:
            logger.warning("%s gave no translation into %s of %r: %s", self.name, target, texts[0], reason)
            return [""]
        middle = len(texts) // 2
        return [text for half in (texts[:middle], texts[middle:]) for text in self.translate(half, source, target)]

    def _request(self, texts: Sequence[str], source: str, target: str) -> dict[str, Any]:
        script = _SCRIPTS.get(target, "in its standard spelling")
        instructions = INSTRUCTIONS.format(
            source=get_language_name(source), target=get_language_name(target), script=script
        )
        numbered = json.dumps({str(number): text for number, text in enumerate(texts, 1)}, ensure_ascii=False)
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": numbered}]
        return {"model": self.name, "messages": messages, **self.options}

    def _post(self, body: Mapping[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "supclap"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        for attempt in range(self.retries + 1):
            self.limiter.wait()
            pause = min(60.0, 2.0**attempt)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_seconds) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                answer = error.read().decode("utf-8", "replace")[:300]
                problem = f"{error.code} {error.reason}: {answer}"
                _refuse(self.url, error.code, problem)
                pause = max(pause, retry_after_seconds(error.headers.get("Retry-After")))
            except (OSError, http.client.HTTPException) as error:
                problem = repr(error)
            self.limiter.pause(pause)
        raise ConnectionError(f"{self.url} failed {self.retries + 1} times, at last with {problem}")


class RateLimiter:
    """Lets requests through evenly, whichever thread they come from.

    Args:
        per_minute: How many a minute; None for no limit.
        clock: Tells the seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        per_minute: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if per_minute is not None and per_minute <= 0:
            raise ValueError(f"requests_per_minute is {per_minute}; it must be positive, or left out")
        self._interval_seconds = 60 / per_minute if per_minute else 0.0
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits for this request's turn."""
        with self._lock:
            now = self._clock()
            turn = max(now, self._free_at)
            self._free_at = turn + self._interval_seconds
        if turn > now:
            self._sleep(turn - now)

    def pause(self, seconds: float) -> None:
        """Lets nobody through for some seconds."""
        with self._lock:
            self._free_at = max(self._free_at, self._clock() + seconds)


class UnusableAnswer(Exception):
    """An answer that is not what was asked for; asking again may help."""


def read_answer(body: bytes, count: int) -> list[str]:
    """The translations in an answer of `/chat/completions`.

    Args:
        body: The response.
        count: How many texts were sent.

    Returns:
        The translations in the order of their numbers.

    Raises:
        UnusableAnswer: It is cut off or no JSON, or has not just the numbers 1 to `count`, each with a text.
    """
    try:
        choice = json.loads(body)["choices"][0]
        content = str(choice["message"]["content"]).rpartition("</think>")[2]  # some models think aloud first
        answer = json.loads(content[content.index("{") : content.rindex("}") + 1])
    except (ValueError, LookupError, TypeError) as error:
        raise UnusableAnswer(f"{type(error).__name__} in {body[:200]!r}") from error
    if choice.get("finish_reason") == "length":
        raise UnusableAnswer(f"the answer was cut off after {len(content)} characters")
    numbers = [str(number) for number in range(1, count + 1)]
    if sorted(answer) != sorted(numbers):
        raise UnusableAnswer(f"{count} texts were sent, the answer has the numbers {sorted(answer)}")
    texts = [answer[number] for number in numbers]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UnusableAnswer(f"the answer has values that are no text: {texts}")
    return texts


def completions_url(endpoint: str) -> str:
    """The address that chat requests go to.

    >>> completions_url("http://localhost:8000"), completions_url("https://api.deepseek.com/v1/")
    ('http://localhost:8000/v1/chat/completions', 'https://api.deepseek.com/v1/chat/completions')
    """
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"endpoint is {endpoint!r}; give an address such as https://api.deepseek.com/v1")
    path = parts.path.rstrip("/") or "/v1"
    path = path if path.endswith("/chat/completions") else f"{path}/chat/completions"
    return urllib.parse.urlunsplit(parts._replace(path=path))


def retry_after_seconds(header: str | None, now: float | None = None) -> float:
    """How long a `Retry-After` header asks to wait, given in seconds or as a date; 0 when it does not say.

    >>> retry_after_seconds("7"), retry_after_seconds(None), retry_after_seconds("soon")
    (7.0, 0.0, 0.0)
    """
    if re.fullmatch(r"\s*\d+(\.\d*)?\s*", header or ""):
        return float(header or 0)
    try:
        until = email.utils.parsedate_to_datetime(header or "").timestamp()
    except ValueError:
        return 0.0
    return max(0.0, until - (time.time() if now is None else now))


def _refuse(url: str, code: int, problem: str) -> None:
    if code in (401, 403):
        raise PermissionError(f"{url} refuses the key: {problem}")
    if code not in _RETRIED:
        raise ValueError(f"{url} refuses the request: {problem}")
