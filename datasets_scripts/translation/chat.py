"""Machine translation by any OpenAI-compatible endpoint, a few texts a request, no faster than it allows."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from modeling_supclap.datasets_scripts.public_names import public_name
from modeling_supclap.languages import get_language_name

logger = logging.getLogger(__name__)

INSTRUCTIONS = """\
You are a professional translator and a native speaker of {target}. You are given short descriptions of sounds that
can be heard in recordings, in {source}, as a JSON object with numbers for keys. Translate each into natural, idiomatic
{target}, as a native speaker would describe the sound: keep every sound, its order in time and its source, use the
usual words for sounds, add nothing and leave nothing out. Write {script}.
Answer with nothing but a JSON object that has the same keys and the translations as its values."""
_SCRIPTS = {"zho": "simplified Chinese characters"}


class ChatTranslator:
    """A language model behind an OpenAI-compatible endpoint, asked by the `openai` client.

    A batch goes as one request, its texts numbered in a JSON object; an answer that has other numbers, or is no such
    object, is asked for once more, then the batch is asked for in halves. A text that fails alone is given up.
    A server that is busy or broken is tried again, later each time, or after as long as it asks for up to two minutes.
    Redirects are not followed: the key goes to the host of the endpoint and to nobody else.

    Args:
        name: The model, as the endpoint calls it.
        endpoint: Its address, such as `https://api.deepseek.com/v1` or `http://localhost:8000`.
        api_key: The key to send as a bearer token; None sends none, whatever the environment holds.
        options: Further fields of the request.
        requests_per_minute: At most so many requests, evenly spaced; None sets no limit.
        workers: The number of requests at a time.
        retries: How often a request is tried again.
        timeout_seconds: How long to wait for an answer.
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
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError('an endpoint needs the openai client: pip install "supclap[translate]"') from error

        self.name = name
        self.options = {"temperature": 0} if options is None else dict(options)
        self.workers = workers
        self.limiter = RateLimiter(requests_per_minute)
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("the endpoint is no address of the web; give one such as https://api.deepseek.com/v1")
        self.host = public_name(endpoint)
        path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"

        withheld = () if api_key or parts.username else ("Authorization",)

        def before_sending(request: Any) -> None:
            """Retries too wait for their turn, and nothing of this machine's environment goes along."""
            for header in ("OpenAI-Organization", "OpenAI-Project", *withheld):
                request.headers.pop(header, None)
            self.limiter.wait()

        self._client = openai.OpenAI(
            base_url=urlunsplit(parts._replace(path=path, query="")),
            default_query=dict(parse_qsl(parts.query)),
            api_key=api_key or "none",
            timeout=timeout_seconds,
            max_retries=retries,
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False, event_hooks={"request": [before_sending], "response": []}
            ),
        )

    def check(self, source: str, target: str) -> None:
        """A language model may be asked for any language."""

    def translate(self, texts: Sequence[str], source: str, target: str) -> list[str]:
        """Translates texts as `Translator.translate`, "" where the model gave no usable answer.

        Raises:
            ConnectionError: The endpoint could not be reached or was busy for all retries.
            PermissionError: It refuses the key.
            ValueError: It refuses the request.
        """
        for _ in range(2):
            try:
                return read_answer(self._ask(texts, source, target), len(texts))
            except UnusableAnswer as error:
                reason = error

        if len(texts) == 1:
            logger.warning("%s gave no translation into %s of %r: %s", self.name, target, texts[0], reason)
            return [""]
        middle = len(texts) // 2
        return [*self.translate(texts[:middle], source, target), *self.translate(texts[middle:], source, target)]

    def _ask(self, texts: Sequence[str], source: str, target: str) -> bytes:
        """The body of the answer, which need not be one that the client understands."""
        import openai

        instructions = INSTRUCTIONS.format(
            source=get_language_name(source),
            target=get_language_name(target),
            script=_SCRIPTS.get(target, "in its standard spelling"),
        )
        numbered = json.dumps({str(number): text for number, text in enumerate(texts, 1)}, ensure_ascii=False)

        try:
            answer = self._client.chat.completions.with_raw_response.create(
                model=self.name,
                messages=[{"role": "system", "content": instructions}, {"role": "user", "content": numbered}],
                extra_body=self.options,
            )
        except openai.APIConnectionError as error:
            raise ConnectionError(f"{self.host} cannot be reached: {error.__cause__ or error}") from error
        except openai.APIStatusError as error:
            status = error.status_code
            said = f"{status} {error.response.text[:300]}"
            if status in (401, 403):
                raise PermissionError(f"{self.host} refuses the key: {said}") from error
            if 300 <= status < 400:
                raise ValueError(f"{self.host} sends requests elsewhere ({said}); give the final address") from error
            if status in (408, 409, 429) or status >= 500:
                raise ConnectionError(f"{self.host} stayed busy or broken: {said}") from error
            raise ValueError(f"{self.host} refuses the request: {said}") from error
        return answer.content


class RateLimiter:
    """Lets so many requests a minute through evenly, whichever thread they come from; None sets no limit."""

    def __init__(
        self,
        per_minute: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if per_minute is not None and per_minute <= 0:
            raise ValueError(f"requests_per_minute is {per_minute}; it must be positive, or left out")
        self.interval_seconds = 60 / per_minute if per_minute else 0.0
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits for this request's turn."""
        with self._lock:
            now = self._clock()
            turn = max(now, self._free_at)
            self._free_at = turn + self.interval_seconds
        if turn > now:
            self._sleep(turn - now)


class UnusableAnswer(Exception):
    """An answer that is not what was asked for; asking again may help."""


def read_answer(body: bytes, count: int) -> list[str]:
    """The translations in the body of an answer of `/chat/completions`, in the order of their numbers.

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
