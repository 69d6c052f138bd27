"""An episode of `isolation="process"`: one world whose process also runs the agent's code."""

import contextlib
import errno
import os

from gvpo_trl.environments.appworld.engine import verdicts
from gvpo_trl.environments.appworld.engine.worlds import journal, patches

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


class Episode:
    """One world and the recorder that knows how each of its steps went.

    Args:
        world: an open `AppWorld`.
        max_output_chars: characters of a step's text.
        journal_path: where to keep the changes after each step; `None` where AppWorld itself saves after each step.
    """

    def __init__(self, world, max_output_chars: int, journal_path: str | None) -> None:
        self.world = world
        self.max_output_chars = max_output_chars
        self.saves_at_the_end = journal_path is not None
        self.recorder = verdicts.Recorder(world)
        patches.save_any_log(world)
        self.was_completed, self.seen_changes = False, patches.count_changes("/supervisor")
        if journal_path is not None:
            world.journal = journal.Journal(journal_path, world.models_to_db_home_path)

    def step(self, code: str) -> dict:
        """Run agent code; the trainer's side makes a `StepResult` of the answer."""
        outcome = verdicts.run_step(self.world, self.recorder, code, self.max_output_chars)
        if isinstance(outcome.escaped, OSError) and outcome.escaped.errno in DISK_ERRORS:
            return {"fault": f"cannot save the world: {outcome.escaped}"}
        if outcome.escaped is not None:
            with contextlib.suppress(Exception):
                self.save()
            self.world.requester.reset_request_count()
        return {
            "text": outcome.text,
            "verdict": outcome.verdict,
            "ended": outcome.ended,
            "failed_line": outcome.failed_line,
            "completed": self.completed(),
            "api_calls": self.recorder.api_calls,
            "api_errors": self.recorder.failed_calls,
        }

    def restore_folders(self) -> None:
        """Create again the folders of the output that agent code may have deleted."""
        for name in ("dbs", "logs", "misc", "checkpoints", "version"):
            os.makedirs(os.path.join(self.world.output_directory, name), exist_ok=True)

    def save(self) -> None:
        """Write the state and the logs, as `execute` does at its end."""
        self.restore_folders()
        self.world._save_state(self.world.output_db_home_path_on_disk)
        self.world.save_logs()

    def completed(self) -> bool:
        """Whether the agent has declared the task complete or given it up."""
        with contextlib.suppress(BaseException):  # the agent may have broken its own world
            changes = patches.count_changes("/supervisor")
            if changes != self.seen_changes or not self.saves_at_the_end:
                # The question costs an API call, so it is asked only when the answer may have changed.
                self.seen_changes = changes
                self.was_completed = bool(self.world.task_completed())
        return self.was_completed

    def finish(self) -> dict:
        """Write everything that the evaluation needs to disk."""
        if self.saves_at_the_end:
            try:
                self.restore_folders()
                self.world.save_all()
            except Exception as error:
                return {"fault": f"cannot save the world: {type(error).__name__}: {error}"}
        return {}
