"""Where in a model an operator runs: the module path, and the branch of the attention that calls it.

The models know nothing of it: modules get hooks for the time of one count, and the attention functions of
`flash_vision.ops` are wrapped by name wherever a loaded module of the package holds them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from flash_vision.ops import attention

# function of flash_vision.ops.attention -> form of its products; where they call each other the innermost counts
ATTENTION_FUNCTIONS = {
    "quadratic_attention": "quadratic",
    "attention_weights": "quadratic",
    "local_product": "quadratic",
    "mixed_product": "quadratic",
    "linear_attention": "linear",
    "linear_factors": "linear",
    "joint_weights": "quadratic",
    "key_value_summary": "linear",
    "global_product": "linear",
}


class ModulePath:
    """The stack of modules that are running, outermost first, as (path, module).

    Use as a context manager around a forward pass of `model`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[tuple[str, nn.Module]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> ModulePath:
        for path, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._push(path)))
            self._handles.append(module.register_forward_hook(self._pop, always_call=True))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _push(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object) -> None:
            self._stack.append((path, module))

        return hook

    def _pop(self, module: nn.Module, args: object, output: object) -> None:
        self._stack.pop()

    @property
    def path(self) -> str:
        """Dotted path of the innermost running module, "" for the model itself."""
        return self._stack[-1][0] if self._stack else ""

    def within(self, *words: str) -> bool:
        """Whether a running module's class name holds one of `words`, in lower case."""
        names = [type(module).__name__.lower() for _, module in self._stack]
        return any(word in name for name in names for word in words)


def attention_part(modules: ModulePath, form: str | None) -> str:
    """The branch that an attention product belongs to.

    Args:
        modules: the running modules.
        form: "quadratic" or "linear" inside one of `ATTENTION_FUNCTIONS`, else None.

    Returns:
        "global" for linear attention and for attention over all tokens; "local" for quadratic attention of a module
        whose class is named after windows or chunks (Swin's WindowAttention, a mixed chunk unit).
    """
    return "local" if form != "linear" and modules.within("window", "chunk") else "global"


@contextmanager
def attention_scopes(scope: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Runs each call of an attention function of this package inside `scope(form)`.

    Args:
        scope: called with "quadratic" or "linear"; the context manager that it returns surrounds the call.
    """
    with ExitStack() as patches:
        for name, form in ATTENTION_FUNCTIONS.items():
            original = vars(attention).get(name)
            if original is None:
                continue
            replacement = _inside(scope, form, original)
            for module_name, module in list(sys.modules.items()):
                if module_name.partition(".")[0] == "flash_vision" and vars(module).get(name) is original:
                    patches.enter_context(mock.patch.object(module, name, replacement))
        yield


def _inside(scope: Callable[[str], AbstractContextManager[Any]], form: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with scope(form):
            return function(*args, **kwargs)

    return run
