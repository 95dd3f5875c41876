"""Translation by an endpoint: what is asked, how often, and what becomes of answers that are of no use."""

import email.utils
import threading

import pytest
from fake_endpoint import completion, fake_endpoint

from modeling_supclap.datasets_scripts.translation.chat import (
    ChatTranslator,
    RateLimiter,
    UnusableAnswer,
    completions_url,
    read_answer,
    retry_after_seconds,
)

TEXTS = ["a dog barks", "a dog barks while the rain falls", "rain"]


class FakeClock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def chat(server, **options):
    clock = FakeClock()
    return ChatTranslator("some-model", server.url, clock=clock, sleep=clock.sleep, **options), clock


def test_a_batch_is_one_request_with_numbered_texts():
    with fake_endpoint() as server:
        translator, _ = chat(server, api_key="secret", options={"temperature": 0.5, "max_tokens": 100})
        assert translator.translate(["Rain", 'A "dog" ça'], "eng", "zho") == ["Chinese: Rain", 'Chinese: A "dog" ça']
        assert server.texts(0) == {"1": "Rain", "2": 'A "dog" ça'}
    request, seen = server.requests[0], server.seen[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("some-model", 0.5, 100)
    assert seen["path"] == "/v1/chat/completions"
    assert seen["Authorization"] == "Bearer secret"
    instructions = request["messages"][0]["content"]
    assert "in English" in instructions
    assert "simplified Chinese characters" in instructions


def test_without_a_key_none_is_sent_and_the_temperature_is_zero():
    with fake_endpoint() as server:
        chat(server)[0].translate(["Rain"], "eng", "fra")
    assert "Authorization" not in server.seen[0]
    assert server.requests[0]["temperature"] == 0


BUSY = (429, {"Retry-After": "7"}, b"slow down")


@pytest.mark.parametrize(
    ("script", "slept"),
    [
        ([BUSY], [7]),
        ([(503, {}, b""), (500, {}, b""), (502, {}, b"")], [1, 2, 4]),
        ([(429, {}, b""), BUSY, (429, {}, b"")], [1, 7, 4]),
        ([(429, {"Retry-After": "0"}, b"")], [1]),
    ],
)
def test_a_busy_endpoint_is_given_the_time_it_asks_for(script, slept):
    with fake_endpoint(*script) as server:
        translator, clock = chat(server)
        assert translator.translate(["Rain"], "eng", "fra") == ["French: Rain"]
    assert clock.slept == pytest.approx(slept)
    assert len(server.requests) == len(script) + 1


def test_an_endpoint_that_stays_busy_is_an_error_with_its_words():
    message = r"failed 3 times, at last with 429 .*slow down"
    with fake_endpoint(*[BUSY] * 3) as server, pytest.raises(ConnectionError, match=message):
        chat(server, retries=2)[0].translate(["Rain"], "eng", "fra")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(401, PermissionError, "refuses the key: 401 .*no such"), (400, ValueError, "refuses the request: 400 .*no such")],
)
def test_what_will_not_get_better_is_not_tried_again(status, error, message):
    with fake_endpoint((status, {}, b"no such")) as server, pytest.raises(error, match=message):
        chat(server)[0].translate(["Rain"], "eng", "fra")
    assert len(server.requests) == 1


def test_an_endpoint_that_is_not_there_is_tried_again_and_then_named():
    with fake_endpoint() as server:
        translator, clock = chat(server, retries=2)
    with pytest.raises(ConnectionError, match=r"failed 3 times, at last with .*refused"):
        translator.translate(["Rain"], "eng", "fra")
    assert clock.slept == pytest.approx([1, 2])


USELESS = {
    "no JSON": lambda texts: completion("Here you are: Pluie"),
    "half JSON": lambda texts: completion('{"1": "Pluie"'),
    "no completion": lambda texts: b"<html>",
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
def test_a_useless_answer_is_asked_for_again_then_in_halves(answer):
    texts = ["Rain", "Wind", "A dog"]
    with fake_endpoint(answer) as server:
        assert chat(server)[0].translate(texts, "eng", "fra") == [f"French: {text}" for text in texts]
    assert [len(server.texts(number)) for number in range(len(server.requests))] == [3, 3]
    with fake_endpoint(answer, answer) as server:
        assert chat(server)[0].translate(texts, "eng", "fra") == [f"French: {text}" for text in texts]
    assert [len(server.texts(number)) for number in range(len(server.requests))] == [3, 3, 1, 2]


def test_a_text_that_fails_alone_is_given_up(caplog):
    def answer(texts):
        return completion("no" if "Wind" in texts.values() else {number: f"({text})" for number, text in texts.items()})

    with fake_endpoint(*[answer] * 20) as server:
        translations = chat(server)[0].translate(["Rain", "Wind", "A dog", "Hail"], "eng", "fra")
    assert translations == ["(Rain)", "", "(A dog)", "(Hail)"]
    assert "gave no translation into fra of 'Wind'" in caplog.text


@pytest.mark.parametrize(
    "content",
    ['```json\n{"1": "Pluie"}\n```', 'Sure!\n{"1": "Pluie"}', '<think>{"1": "Rain?"}</think>\n\n{"1": "Pluie"}'],
)
def test_what_stands_around_the_answer_is_ignored(content):
    assert read_answer(completion(content), 1) == ["Pluie"]


def test_the_order_of_the_answer_does_not_matter():
    numbers = {str(number): f"t{number}" for number in range(12, 0, -1)}
    assert read_answer(completion(numbers), 12) == [f"t{number}" for number in range(1, 13)]
    with pytest.raises(UnusableAnswer, match=r"11 texts were sent, the answer has the numbers"):
        read_answer(completion(numbers), 11)


def test_requests_are_evenly_spaced_whoever_makes_them():
    clock = FakeClock()
    with fake_endpoint() as server:
        translator = ChatTranslator("m", server.url, requests_per_minute=30, clock=clock, sleep=clock.sleep)
        for _ in range(4):
            translator.translate(["Rain"], "eng", "fra")
    assert clock.slept == pytest.approx([2, 2, 2])


def test_threads_share_the_limit():
    turns, lock = [], threading.Lock()

    def sleep(seconds):
        with lock:
            turns.append(seconds)

    limiter = RateLimiter(60, clock=lambda: 0.0, sleep=sleep)
    threads = [threading.Thread(target=limiter.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turns) == pytest.approx([1, 2, 3, 4, 5, 6, 7])
    limiter.pause(100)
    limiter.wait()
    assert turns[-1] == pytest.approx(100)


@pytest.mark.parametrize("per_minute", [0, -1])
def test_a_limit_that_lets_nothing_through_is_refused(per_minute):
    with pytest.raises(ValueError, match=r"requests_per_minute is .*; it must be positive"):
        RateLimiter(per_minute)


def test_retry_after_may_be_a_date():
    now = 1_700_000_000.0
    assert retry_after_seconds(email.utils.formatdate(now + 90, usegmt=True), now) == pytest.approx(90)
    assert retry_after_seconds(email.utils.formatdate(now - 90, usegmt=True), now) == 0
    assert retry_after_seconds("1.5") == 1.5
    assert [retry_after_seconds(text) for text in ("inf", "nan", "-3", "", None)] == [0] * 5


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:8000/", "http://localhost:8000/v1/chat/completions"),
        ("https://host/openai/v1", "https://host/openai/v1/chat/completions"),
        ("https://host/v1/chat/completions", "https://host/v1/chat/completions"),
        ("https://host/v1?version=2", "https://host/v1/chat/completions?version=2"),
    ],
)
def test_the_endpoint_may_be_given_in_several_ways(endpoint, url):
    assert completions_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["localhost:8000", "ftp://host/v1", "http://", "file:///etc/passwd"])
def test_what_is_no_address_is_refused(endpoint):
    with pytest.raises(ValueError, match=r"give an address such as https://api.deepseek.com/v1"):
        completions_url(endpoint)
