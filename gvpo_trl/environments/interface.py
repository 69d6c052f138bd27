"""Names what is wrong with the methods and the results of an environment, and says how to mend it.

`try_environment` runs when a trainer is constructed, so that a mistake shows before a model is loaded. The `checked_…`
functions look at every result of a rollout. `checks.py` tests what an environment does, and takes longer.
"""

import inspect
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gvpo_trl.environments.base import Environment, Episode, ResetResult, Score, StepResult
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EnvironmentFault, SetupError

logger = logging.getLogger(__name__)

METHODS_OF_ENVIRONMENT = {"open": ("task_id",), "close": ()}
METHODS_OF_EPISODE = {"step": ("code",), "score": (), "close": ()}
TRIAL_CODE = ("print(1)", "1 / 0")
"""What a trial episode runs: in Python a step that executes and one that fails, in another language two failures."""


def try_environment(env: Environment, task_id: str) -> None:
    """Check an environment's methods, then run one episode and check what its methods return.

    No episode is opened if the environment has an attribute `is_checked` that is true. A fault of the environment's
    machinery is only logged, because the rollout handles faults.

    Args:
        env: the environment of a rollout.
        task_id: a task of the training data.

    Raises:
        SetupError: a method or a result is not what `environments.base` asks for.
    """
    check_interface(env)
    if getattr(env, "is_checked", False):
        return
    name = type(env).__name__
    try:
        # The rollout calls the methods of an episode in changing threads, too. The thread that opens lives on, because
        # a new thread may get the identity of one that has ended.
        with ThreadPoolExecutor(1) as opener:
            opening = opener.submit(_call, f"{name}.open({task_id!r})", env.open, task_id)
            episode = checked_episode(opening.result(), name)
            kind = type(episode).__name__
            try:
                for code in TRIAL_CODE:
                    checked_step(_call(f"{kind}.step({code!r})", episode.step, code), kind)
                checked_score(_call(f"{kind}.score()", episode.score), kind)
            finally:
                _call(f"{kind}.close()", episode.close)
    except EnvironmentFault as fault:
        logger.warning("A trial episode of %s met a fault (%s): %s", name, fault.boundary, fault)


def check_interface(env: Environment) -> None:
    """Check that an environment has the attributes and methods that a rollout uses. Nothing is called.

    Raises:
        SetupError: one is missing, or a method cannot be called as the rollout calls it.
    """
    if isinstance(env, type):
        raise SetupError(f"the environment is the class {env.__name__}; pass an instance, such as {env.__name__}().")
    name = type(env).__name__
    _check_methods(env, name, METHODS_OF_ENVIRONMENT)
    if callable(getattr(env, "prefetch", None)):
        _check_methods(env, name, {"prefetch": ("task_ids",)})
    limit = getattr(env, "max_episodes", None)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise SetupError(
            f"{name}.max_episodes is {limit!r}; set it to the number of episodes that may be open at once, at least 1."
        )


def checked_episode(episode: Any, owner: str) -> Episode:
    """Return what `open` of the environment class `owner` returned, or raise a `SetupError` that names its mistake."""
    if episode is None:
        raise SetupError(f"{owner}.open returned None; return the episode that it opened.")
    _refuse_coroutine(episode, f"{owner}.open")
    name = type(episode).__name__
    _check_methods(episode, name, METHODS_OF_EPISODE)
    reset = getattr(episode, "reset", None)
    if not isinstance(reset, ResetResult):
        raise SetupError(
            f"{name}.reset is {_shown(reset)}; set self.reset = ResetResult(task_id=task_id, seconds=…), the time "
            "that the episode took to open."
        )
    return episode


def checked_step(result: Any, owner: str) -> StepResult:
    """Return what `step` of the episode class `owner` returned, or raise a `SetupError` that names its mistake."""
    _refuse_coroutine(result, f"{owner}.step")
    if not isinstance(result, StepResult):
        raise SetupError(
            f"{owner}.step returned {_shown(result)}; return StepResult(text=…, failure=…), with failure=None for a "
            "step that executed."
        )
    if not isinstance(result.text, str):
        raise SetupError(f"{owner}.step returned text={_shown(result.text)}; give the agent a str.")
    if result.failure is not None and result.failure not in list(FailureKind):
        kinds = ", ".join(FailureKind)
        raise SetupError(
            f"{owner}.step returned failure={_shown(result.failure)}; use None or a FailureKind: {kinds}."
        )
    return result


def checked_score(score: Any, owner: str) -> Score:
    """Return what `score` of the episode class `owner` returned, or raise a `SetupError` that names its mistake."""
    _refuse_coroutine(score, f"{owner}.score")
    if not isinstance(score, Score):
        raise SetupError(
            f"{owner}.score returned {_shown(score)}; return Score(passed=(…), failed=(…)) with the names of the "
            "tests."
        )
    for name in ("passed", "failed"):
        texts = getattr(score, name)
        if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
            raise SetupError(
                f"{owner}.score returned {name}={_shown(texts)}; give a tuple with the name of each test, such as "
                '("the answer is right",).'
            )
    return score


def _check_methods(owner: Any, name: str, methods: dict[str, tuple[str, ...]]) -> None:
    for method_name, arguments in methods.items():
        wanted = f"{method_name}({', '.join(('self', *arguments))})"
        method = getattr(owner, method_name, None)
        if not callable(method):
            raise SetupError(f"{name} has no method {method_name!r}; add `def {wanted}`.")
        if inspect.iscoroutinefunction(method):
            raise SetupError(
                f"{name}.{method_name} is `async def`; the rollout calls it in a thread of its own, so write "
                f"`def {wanted}` that blocks."
            )
        try:
            signature = inspect.signature(method)
        except ValueError:  # some builtins have none
            continue
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise SetupError(
                f"{name}.{method_name}{signature} cannot be called with ({', '.join(arguments)}): {error}; write "
                f"`def {wanted}`."
            ) from None


def _refuse_coroutine(value: Any, name: str) -> None:
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # Python would warn that nobody awaited it
        raise SetupError(f"{name} returned {_shown(value)}; the rollout does not await, so return the result itself.")


def _call(what: str, method: Any, *arguments: str) -> Any:
    """Call a method, and turn an exception that is not part of the protocol into a `SetupError`."""
    try:
        return method(*arguments)
    except (EnvironmentFault, SetupError):
        raise
    except Exception as error:
        raise SetupError(
            f"{what} raised {type(error).__name__}: {error}. Return a StepResult with a failure for a mistake of the "
            "agent, raise an EnvironmentFault for one of the environment, and expect each call in another thread."
        ) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
