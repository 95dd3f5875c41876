"""Limits on the number of functions and files between input and result."""

from call_graph import evaluation_calls, training_calls


def test_the_road_from_twelve_clips_to_results_stays_short():
    calls = evaluation_calls()
    assert len(calls.functions) <= 175
    assert len(calls.files) <= 27


def test_the_road_from_a_batch_to_its_loss_stays_short():
    calls = training_calls()
    assert len(calls.functions) <= 50
    assert len(calls.files) <= 14
