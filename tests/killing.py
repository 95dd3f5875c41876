"""Ends a run between two steps, as a crash would."""

from transformers import TrainerCallback


class Killed(Exception):
    """The crash."""


class KillAt(TrainerCallback):
    """Crashes after the given step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed
