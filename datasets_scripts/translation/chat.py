"""Machine translation with an OpenAI-compatible endpoint, several texts per request."""

import json
import logging
from collections.abc import Mapping, Sequence
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
    """Translator that uses a language model on an OpenAI-compatible endpoint.

    Each batch is sent as one request: a JSON object with numbered texts. If the answer is not a JSON object with the
    same numbers, the request is repeated once. If the second answer is also invalid, the batch is split into halves. A
    single text with two invalid answers is skipped.

    The client retries requests to a busy or failing server with increasing delays, or after the delay that the server
    requests (up to two minutes). Redirects are not followed, so that the API key is only sent to the endpoint's host.

    Args:
        endpoint: URL, such as `https://api.deepseek.com/v1` or `http://localhost:8000`.
        api_key: Bearer token. None: no token is sent, even if the environment contains one.
        options: Additional request fields. None: `{"temperature": 0}`.
        workers: Number of parallel requests.

    Raises:
        ImportError: The `openai` client is not installed.
        ValueError: `endpoint` is not an http(s) URL.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        workers: int = 4,
        retries: int = 6,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError('endpoints require the openai client: pip install "supclap[translate]"') from error

        self.name = name
        self.options = {"temperature": 0} if options is None else dict(options)
        self.workers = workers
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("the endpoint is not an http(s) URL; give one such as https://api.deepseek.com/v1")
        self.host = public_name(endpoint)
        path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"

        withheld = () if api_key or parts.username else ("Authorization",)

        def before_sending(request: Any) -> None:
            """Remove headers that the client read from the environment."""
            for header in ("OpenAI-Organization", "OpenAI-Project", *withheld):
                request.headers.pop(header, None)

        self._client = openai.OpenAI(
            base_url=urlunsplit(parts._replace(path=path, query="")),
            default_query=dict(parse_qsl(parts.query)),
            api_key=api_key or "none",
            timeout=120.0,
            max_retries=retries,
            http_client=openai.DefaultHttpxClient(follow_redirects=False, event_hooks={"request": [before_sending]}),
        )

    def check(self, source: str, target: str) -> None:
        """Accept all languages, because it is unknown which languages the model supports."""

    def translate(self, texts: Sequence[str], source: str, target: str) -> list[str]:
        """Translate texts (see `Translator.translate`); return "" for a text without a valid answer.

        Raises ConnectionError if the endpoint does not answer, and PermissionError if it rejects the API key.
        """
        for _ in range(2):
            try:
                return read_answer(self._ask(texts, source, target), len(texts))
            except UnusableAnswer as error:
                reason = error

        if len(texts) == 1:
            logger.warning("%s returned no translation into %s of %r: %s", self.name, target, texts[0], reason)
            return [""]
        middle = len(texts) // 2
        return [*self.translate(texts[:middle], source, target), *self.translate(texts[middle:], source, target)]

    def _ask(self, texts: Sequence[str], source: str, target: str) -> bytes:
        """Send a request and return the raw body of the answer; `read_answer` checks it."""
        import openai

        instructions = INSTRUCTIONS.format(
            source=get_language_name(source),
            target=get_language_name(target),
            script=_SCRIPTS.get(target, "in its standard spelling"),
        )
        by_number = {str(number): text for number, text in enumerate(texts, 1)}
        numbered = json.dumps(by_number, ensure_ascii=False)

        try:
            answer = self._client.chat.completions.with_raw_response.create(
                model=self.name,
                messages=[{"role": "system", "content": instructions}, {"role": "user", "content": numbered}],
                extra_body=self.options,
            )
        except openai.APIConnectionError as error:
            raise ConnectionError(f"{self.host} cannot be reached: {error.__cause__ or error}") from error
        except openai.APIStatusError as error:
            detail = f"{error.status_code} {error.response.text[:300]}"
            kind = PermissionError if error.status_code in (401, 403) else ConnectionError
            raise kind(f"{self.host} did not accept the request; its answer: {detail}") from error
        return answer.content


class UnusableAnswer(Exception):
    """Error if an answer is truncated, is not JSON, or lacks a translation. A second request may succeed."""


def read_answer(body: bytes, count: int) -> list[str]:
    """Parse an answer of `/chat/completions` and return its `count` translations in the order of their numbers."""
    try:
        choice = json.loads(body)["choices"][0]
        content = str(choice["message"]["content"]).rpartition("</think>")[2]  # skip a reasoning trace
        answer = json.loads(content[content.index("{") : content.rindex("}") + 1])
        texts = [answer.pop(str(number)) for number in range(1, count + 1)]
    except (ValueError, LookupError, TypeError) as error:
        raise UnusableAnswer(f"{type(error).__name__} in {body[:200]!r}") from error

    if choice.get("finish_reason") == "length":
        raise UnusableAnswer(f"the answer was truncated after {len(content)} characters")

    if answer or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UnusableAnswer(f"the answer to {count} texts has blank values, or others than texts: {texts} {answer}")
    return texts
