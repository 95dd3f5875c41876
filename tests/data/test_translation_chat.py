"""Translation with an endpoint: requests, retries, and invalid answers."""

import re
import sys
import time

import pytest
from fake_endpoint import completion, fake_endpoint

from modeling_supclap.datasets_scripts.translation.chat import ChatTranslator, UnusableAnswer, read_answer


@pytest.fixture
def slept(monkeypatch):
    """List of the waiting times of the client, which does not really wait."""
    seconds = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def chat(server, path="", **options):
    return ChatTranslator("some-model", server.url + path, **options)


def test_a_batch_is_one_request_with_numbered_texts():
    with fake_endpoint() as server:
        translator = chat(server, api_key="secret", options={"temperature": 0.5, "max_tokens": 100, "top_k": 3})
        assert translator.translate(["Rain", 'A "dog" ça'], "eng", "zho") == ["Chinese: Rain", 'Chinese: A "dog" ça']
        assert server.texts(0) == {"1": "Rain", "2": 'A "dog" ça'}
        assert [message["role"] for message in server.requests[0]["messages"]] == ["system", "user"]
        assert "ça" in server.requests[0]["messages"][1]["content"]  # not as an escape, which costs tokens
    request, seen = server.requests[0], server.seen[0]
    assert {name: request[name] for name in ("model", "temperature", "max_tokens", "top_k")} == {
        "model": "some-model", "temperature": 0.5, "max_tokens": 100, "top_k": 3
    }  # fmt: skip
    assert seen["path"] == "/v1/chat/completions"
    assert seen["Authorization"] == "Bearer secret"
    instructions = request["messages"][0]["content"]
    assert "in English" in instructions
    assert "simplified Chinese characters" in instructions


def test_without_a_key_none_is_sent_and_the_temperature_is_zero(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another house")
    monkeypatch.setenv("OPENAI_ORG_ID", "my employer")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "my project")
    with fake_endpoint() as server:
        chat(server).translate(["Rain"], "eng", "fra")
    assert not {"Authorization", "Openai-Organization", "Openai-Project"} & server.seen[0].keys()
    assert server.requests[0]["temperature"] == 0


def test_a_user_and_a_password_in_the_address_are_sent():
    with fake_endpoint() as server:
        translator = ChatTranslator("m", server.url.replace("://", "://ann:secret@"))
        assert translator.translate(["Rain"], "eng", "fra") == ["French: Rain"]
    assert server.seen[0]["Authorization"] == "Basic YW5uOnNlY3JldA=="
    assert translator.host == server.url
    assert ChatTranslator("m", "https://host.org/v1").host == "https://host.org/v1"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status, slept):
    with fake_endpoint() as elsewhere:
        headers = {"Location": elsewhere.url + "/v1/chat/completions"}
        with (
            fake_endpoint((status, headers, b"")) as server,
            pytest.raises(ConnectionError, match=re.escape(server.url)),
        ):
            chat(server, api_key="secret").translate(["Rain"], "eng", "fra")
    assert elsewhere.seen == []
    assert len(server.seen) == 1


BUSY = (429, {"Retry-After": "7"}, b"slow down")


@pytest.mark.parametrize("script", [[BUSY], [BUSY, BUSY], [(503, {}, b""), (500, {}, b""), (502, {}, b"")]])
def test_requests_to_a_busy_endpoint_are_repeated_later(script, slept):
    with fake_endpoint(*script) as server:
        assert chat(server).translate(["Rain"], "eng", "fra") == ["French: Rain"]
    assert len(server.requests) == len(slept) + 1 == len(script) + 1
    if BUSY in script:
        assert slept == [7] * len(script)
    assert all(0 < seconds < 10 for seconds in slept)


@pytest.mark.parametrize("header", ["100000", "inf", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_waiting_times_are_limited(header, slept):
    busy = (429, {"Retry-After": header}, b"come back later")
    with fake_endpoint(*[busy] * 3) as server, pytest.raises(ConnectionError, match="come back later"):
        chat(server, retries=2).translate(["Rain"], "eng", "fra")
    assert sum(slept) < 60


def test_the_error_of_a_busy_endpoint_contains_its_answer(slept):
    with fake_endpoint(*[BUSY] * 3) as server, pytest.raises(ConnectionError, match=r"429 slow down"):
        chat(server, retries=2).translate(["Rain"], "eng", "fra")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (401, PermissionError, "401 no such"),
        (403, PermissionError, "403 no such"),
        (400, ConnectionError, "400 no such"),
    ],
)
def test_permanent_errors_are_not_retried(status, error, message):
    with fake_endpoint((status, {}, b"no such")) as server, pytest.raises(error, match=message):
        chat(server).translate(["Rain"], "eng", "fra")
    assert len(server.requests) == 1


def test_an_endpoint_that_is_not_there_is_tried_again_and_then_named(slept):
    with fake_endpoint() as server:
        translator = chat(server, retries=2)
    with pytest.raises(ConnectionError, match=server.url):
        translator.translate(["Rain"], "eng", "fra")
    assert len(slept) == 2


USELESS = {
    "no JSON": lambda texts: completion("Here you are: Pluie"),
    "half JSON": lambda texts: completion('{"1": "Pluie"'),
    "no completion": lambda texts: b"<html>",
    "a list": lambda texts: b"[]",
    "no choices": lambda texts: b'{"choices": []}',
    "no text": lambda texts: b'{"choices": [{"message": {"content": null}}]}',
    "one too few": lambda texts: completion(dict.fromkeys(list(texts)[:-1], "x")),
    "one too many": lambda texts: completion(dict.fromkeys([*texts, "9"], "x")),
    "other numbers": lambda texts: completion({f"0{number}": "x" for number in texts}),
    "a blank": lambda texts: completion(dict.fromkeys(texts, " ")),
    "no string": lambda texts: completion(dict.fromkeys(texts, 5)),
    "cut off": lambda texts: completion(dict.fromkeys(texts, "x"), finish_reason="length"),
}


@pytest.mark.parametrize("answer", USELESS.values(), ids=USELESS)
def test_a_request_with_an_invalid_answer_is_repeated_then_split(answer):
    texts = ["Rain", "Wind", "A dog"]
    with fake_endpoint(answer) as server:
        assert chat(server).translate(texts, "eng", "fra") == [f"French: {text}" for text in texts]
    assert [len(server.texts(number)) for number in range(len(server.requests))] == [3, 3]
    with fake_endpoint(answer, answer) as server:
        assert chat(server).translate(texts, "eng", "fra") == [f"French: {text}" for text in texts]
    assert [len(server.texts(number)) for number in range(len(server.requests))] == [3, 3, 1, 2]


def test_a_failing_text_is_skipped(caplog):
    def answer(texts):
        return completion(
            "no" if "Wind" in texts.values() else {number: f"({text})" for number, text in texts.items()}
        )

    with fake_endpoint(*[answer] * 20) as server:
        translations = chat(server).translate(["Rain", "Wind", "A dog", "Hail"], "eng", "fra")
    assert translations == ["(Rain)", "", "(A dog)", "(Hail)"]
    assert re.search("fra.*'Wind'", caplog.text)


@pytest.mark.parametrize(
    "content",
    ['```json\n{"1": "Pluie"}\n```', 'Sure!\n{"1": "Pluie"}', '<think>{"1": "Rain?"}</think>\n\n{"1": "Pluie"}'],
)
def test_text_around_the_answer_is_ignored(content):
    assert read_answer(completion(content), 1) == ["Pluie"]


def test_the_order_of_the_answer_does_not_matter():
    numbers = {str(number): f"t{number}" for number in range(12, 0, -1)}
    assert read_answer(completion(numbers), 12) == [f"t{number}" for number in range(1, 13)]
    with pytest.raises(UnusableAnswer, match=r"\b11\b"):
        read_answer(completion(numbers), 11)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/openai/v1/", "/openai/v1/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1?version=2&key=secret", "/v1/chat/completions?version=2&key=secret"),
    ],
)
def test_the_endpoint_may_be_given_in_several_ways(path, asked):
    with fake_endpoint() as server:
        translator = chat(server, path)
        translator.translate(["Rain"], "eng", "fra")
    assert server.seen[0]["path"] == asked
    assert "secret" not in translator.host


def test_the_error_without_the_client_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"openai.*supclap\[translate\]"):
        ChatTranslator("m", "http://localhost:8000")


@pytest.mark.parametrize("endpoint", ["localhost:8000", "ftp://host/v1", "http://", "file:///etc/passwd"])
def test_invalid_addresses_are_rejected(endpoint):
    with pytest.raises(ValueError, match="endpoint"):
        ChatTranslator("m", endpoint)
