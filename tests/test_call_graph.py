"""Limits on the number of functions and files between input and result."""

from call_graph import batch_calls, evaluation_calls, training_calls


def test_few_functions_run_between_clips_and_results():
    calls = evaluation_calls()
    assert len(calls.functions) <= 185
    assert len(calls.files) <= 35


def test_few_functions_run_between_a_batch_and_its_loss():
    calls = training_calls()
    assert len(calls.functions) <= 50  # InfoNCE and support vectors, and results of own objectives, are functions
    assert len(calls.files) <= 15


def test_few_functions_run_between_two_rows_and_a_batch():
    calls = batch_calls()
    assert len(calls.functions) <= 50  # clips are looked up, extracted one by one, kept and stacked
    assert calls.changes <= 41  # an identifier and a block of sound each return from another file
