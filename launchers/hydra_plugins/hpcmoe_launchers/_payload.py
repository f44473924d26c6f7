"""What travels between a Hydra app and the processes of its points: the task once a sweep, a JobReturn back from each point."""

from __future__ import annotations

import io
import os
import pickle
import sys
import tempfile
import traceback
import types
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hpcmoe.errors import UserError
from hpcmoe.runs.rundir import RunDir


@dataclass(frozen=True)
class Task:
    """The app, as it was when the sweep was submitted."""

    function: TaskFunction
    context: HydraContext
    config: DictConfig  # the multirun's own: what each point's overrides are applied to
    singletons: Any  # Hydra's process-wide state, with the resolvers that the app registered


class TaskRaised(RuntimeError):  # noqa: N818  it stands for an exception that could not travel
    """An exception that cannot be unpickled where it should be raised again; its text is the message."""


def write_task(path: Path, function: TaskFunction, context: HydraContext, config: DictConfig) -> None:
    """Raises UserError for a task that cannot travel."""
    task = Task(function, context, config, Singleton.get_state())
    try:
        body = _dumps(task)
    except Exception as error:  # pickling runs the app's own code
        raise UserError(
            f"the task function cannot be sent to its jobs: {type(error).__name__}: {error}; "
            "what it refers to outside itself must be importable or picklable"
        ) from error
    # In front, and of built-in types only: where modules were found, without which the rest could not be read.
    _write(path, pickle.dumps([entry or os.getcwd() for entry in sys.path]) + body)


def read_task(path: Path) -> Task:
    """Also makes importable what was so at submission. Raises whatever the app's own modules raise."""
    with path.open("rb") as file:
        entries = pickle.load(file)
        sys.path[:] = [*entries, *(entry for entry in sys.path if entry not in entries)]
        task = pickle.load(file)
    assert isinstance(task, Task)
    return task


def return_path(run: RunDir) -> Path:
    return run.path / "job_return.pickle"


def write_return(run: RunDir, attempt: str, done: JobReturn) -> JobReturn:
    """Keep what the task returned or raised. Returns it as it will be read: FAILED where the value cannot be pickled."""
    if done.status == JobStatus.FAILED:
        done.return_value = _portable(done._return_value)
    try:
        data = _dumped(attempt, done)
    except Exception as error:  # pickling runs the app's own code
        kind = type(done._return_value).__name__
        done.status = JobStatus.FAILED
        done.return_value = TaskRaised(f"the task ended, but its return value ({kind}) cannot be pickled: {error}")
        data = _dumped(attempt, done)
    _write(return_path(run), data)
    return done


def completed_in(run: RunDir) -> str | None:
    """The attempt in which the task returned; None: it has not. Needs none of the app's modules."""
    try:
        with return_path(run).open("rb") as file:
            attempt, completed = pickle.load(file)
    except FileNotFoundError:
        return None
    return str(attempt) if completed else None


def read_return(run: RunDir, attempt: str | None = None) -> JobReturn | None:
    """What the task has returned or raised; None: nothing, or not in that attempt."""
    try:
        with return_path(run).open("rb") as file:
            of, _ = pickle.load(file)
            done: JobReturn = pickle.load(file)
    except FileNotFoundError:
        return None
    return done if attempt is None or of == attempt else None


def _dumps(value: Any) -> bytes:
    """cloudpickle's way, but code keeps the name of its file: without, a traceback could not show the app's own lines."""
    import cloudpickle

    reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]

    def reduce(code: types.CodeType) -> Any:
        make, parts = reduce_code(code)
        return _code, (make, parts, os.path.abspath(code.co_filename))

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: reduce}, cloudpickle.Pickler.dispatch_table)

    pickled = io.BytesIO()
    Pickler(pickled).dump(value)
    return pickled.getvalue()


def _code(make: Callable[..., types.CodeType], parts: tuple[Any, ...], file: str) -> types.CodeType:
    return make(*parts).replace(co_filename=file)


def _dumped(attempt: str, done: JobReturn) -> bytes:
    body = _dumps(done)
    pickle.loads(body)
    return pickle.dumps((attempt, done.status == JobStatus.COMPLETED)) + body


def _portable(error: BaseException) -> BaseException:
    """The same exception with its traceback as a note, since pickles carry no tracebacks."""
    said = "".join(traceback.format_exception(error)).rstrip()
    try:
        copy = pickle.loads(_dumps(error))
        if type(copy).__name__ != type(error).__name__ or str(copy) != str(error):
            raise ValueError("it came back as another")
    except Exception:  # an exception's own __init__ may want anything
        error = TaskRaised(f"{type(error).__name__}: {error}")
    else:
        error = copy
    error.add_note(f"It was raised in the point's own process:\n{said}")
    return error


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
