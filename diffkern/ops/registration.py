"""An op as torch and its callers know it: declared once, with one way from a call to its provider."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from typing_extensions import TypeVar

from diffkern.ops.inductor import register_fallback
from diffkern.ops.norm_gradients import needs_grad
from diffkern.providers.base import Kernel
from diffkern.providers.dispatch_modes import constant_in_graphs, modes_active, transforms_active
from diffkern.providers.eager import PROVIDER as EAGER
from diffkern.providers.eager import compute_dtype
from diffkern.providers.registry import NoProviderError, dispatch_cache, kernel_for, override, select
from diffkern.providers.signatures import SIGNATURES, schema, without_defaults

NAMESPACE = "diffkern"

#: The form of a compiled op that takes the operands alone: every argument of a schema costs, also one left out.
PLAIN = "{}_plain"
#: The form that leaves rows of its last result's memory free, in front of those of each sample and behind them.
ROOM = "{}_room"

#: Entries of the dispatch cache, beyond which it is emptied: options such as a length of text may have any value.
_MOST_ENTRIES = 4096

#: Classes of operands for which an entry is made. It serves subclasses too: torch hands those the call.
_PLAIN_CLASSES = frozenset({Tensor, torch.nn.Parameter, type(None), list, tuple, int})

#: Classes of tensors whose memory holds their values.
_MEMORY = (Tensor, torch.nn.Parameter)

#: Of the arguments that have or name a dtype, those that no kernel computes in.
_NOT_COMPUTED_IN = ("coords", "round_dtype")

#: What the message of a failed call through torch's stable ABI says, and all it says.
_ABI_FAILED = "API call failed"

# Bound once, since every call asks.
_is_traced = torch.compiler.is_dynamo_compiling
_grad_is_enabled = torch.is_grad_enabled
_functorch_is_active = torch._C._are_functorch_transforms_active

#: What an op returns.
R = TypeVar("R", default=Any)

_ops: dict[str, Op] = {}


class Op(Generic[R]):
    """One op: what torch knows it by, and how a call of the public function reaches a kernel.

    A call has *operands*, which go to the kernel as they are (a list where its schema has one: torch would take a
    tensor for a list of its rows), and of which the first is the tensor that decides where it runs; *options*; and the
    name of a provider, or None. The first call of a kind is dispatched slowly: it is checked, and given to the kernel
    that the registry chooses. If that is an op of torch, as the compiled kernels are, the dispatch cache keeps it. Such
    a kernel looks at shapes and dtypes itself, and whether it was given tensors, so the next call on one device goes
    straight there, without the arguments at the end that have their default. If it raises, the call is checked again:
    another provider may serve it, or the public function says what is wrong; otherwise the kernel's error is raised,
    and nothing runs twice. Functions of Python, such as those that launch Triton kernels, look at little: a call that
    finds one in the cache is checked as before.

    A graph of ``torch.compile`` holds the op of the provider, unless a gradient is wanted: then it holds
    :attr:`op`, which has one. Exported programs hold :attr:`op` too, and choose where they run.

    Args:
        name: A name in :data:`diffkern.providers.signatures.SIGNATURES`.
        prepare: Takes operands and options and returns the arguments of the kernel, after checking them: the operands,
            and what the options stand for, which must depend on nothing but them and the dtype of the first tensor.
        fake: Takes the arguments of the kernel by name; gives shape, dtype and strides of the result, without data.
        backward: The gradients of the first arguments of the kernel; the others have none. Without it, the unrounded
            reference is differentiated, whose tensors come first.
        setup_context: Saves for the backward pass; called only when a gradient is needed. Without it all tensors are
            saved, and the options are attributes of the context, named as in the schema.
        traced: What ``torch.compile`` traces in place of an op, for one that plain PyTorch alone computes; None is
            returned where the graph shall hold the op.

    Attributes:
        op: ``torch.ops.diffkern.<name>``, with the arguments of the kernel and ``provider``. It chooses at run time.
    """

    def __init__(
        self, name: str, prepare: Callable[..., tuple[Any, ...]], fake: Callable[..., R],
        backward: Callable[..., Sequence[Any]] | None = None, *, setup_context: Callable[..., None] | None = None,
        traced: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self._name = name
        self._prepare = prepare
        self._fake_by_name = fake
        self._gradients = backward or self._reference_gradients
        self._seen_through = traced
        self._of_kernels: dict[Kernel, OpOverload] = {}
        arguments = schema(name).arguments
        self._names = [argument.name for argument in arguments]
        signature, default = SIGNATURES[name], "=None"
        self._takes_lists = "[]" in signature
        if self._takes_lists:
            # Torch wants the gradients of an op with lists in exactly the structure of its arguments.
            signature, default = without_defaults(signature), ""
        signature = signature.replace(") ->", f", str? provider{default}) ->")
        self.op = define(name, signature, self._compute, self._fake)
        qualified = self.op._schema.name
        torch.library.register_autograd(qualified, self._backward, setup_context=setup_context or self._save)
        namespace, _, own = qualified.partition("::")
        self._op_name = namespace, own
        self._defaults = tuple(argument.default_value for argument in self.op._schema.arguments)
        self._tensors_at = [index for index, argument in enumerate(arguments) if "Tensor" in str(argument.real_type)]
        self._optional = tuple(argument.default_value for argument in arguments if argument.has_default_value())
        self._computed_in = [
            index
            for index, argument in enumerate(arguments)
            if re.search("Tensor|ScalarType", str(argument.real_type)) and argument.name not in _NOT_COMPUTED_IN
        ]
        _ops[name] = self

    def call(self, operands: tuple[Any, ...], options: tuple[Any, ...], provider: str | None) -> R:
        """Computes the op, from the dispatch cache if it holds the kernel.

        Args:
            operands: The first arguments of the kernel, in its order, a tensor first.
            options: What else ``prepare`` takes; the cache keeps the kernel only if they are hashable.
            provider: As in the public functions.
        """
        key: Hashable = None
        kernel: Callable[..., R]
        if not _is_traced():
            x = operands[0]
            if type(x) is Tensor:
                given = len(operands)
                while operands[given - 1] is None:
                    given -= 1
                device = x.device
                key = (self, options, provider, override(), device, x.dtype, given)
                try:
                    entry = dispatch_cache.get(key)
                except TypeError:  # an option is a list, for example, and has no hash
                    key = entry = None
                if (
                    entry is not None
                    and not _functorch_is_active()
                    and forward_ad._current_level < 0
                    and not (_grad_is_enabled() and _wants_gradient(operands))
                ):
                    kernel, count, rest, overload = entry
                    if not count:
                        args = self._prepared(operands, options)
                        if self._are_of(args, rest) and not modes_active():
                            return kernel(*args)
                    elif _are_on(device, operands):
                        try:
                            return kernel(*operands[:count], *rest) if rest else kernel(*operands[:count])
                        except RuntimeError as error:
                            self._raise_unless_refused(error, overload, operands, options, provider)
        return self.dispatch_slow(operands, options, provider, key)  # type: ignore[no-any-return]

    def call_with_room(
        self, operands: tuple[Any, ...], options: tuple[Any, ...], provider: str | None, room: tuple[int, int]
    ) -> Any:
        """What the op returns, its last tensor with the memory around it; None where nothing leaves such room.

        No kernel but a compiled one does, and none where a gradient is wanted or a graph is traced.
        """
        args = self._prepared(operands, options)
        if self._needs_torch(args):
            return None
        kernel = kernel_for(self._name, args[0].device, provider, *self._dtypes(args))
        form = _form(kernel, ROOM) if isinstance(kernel, OpOverload) else None
        return None if form is None else self._run(form.default, (*args, *room))

    def dispatch_slow(
        self, operands: tuple[Any, ...], options: tuple[Any, ...], provider: str | None, key: Hashable = None
    ) -> Any:
        """Computes the op, everything checked; keeps the kernel in the dispatch cache under ``key`` if it can."""
        args = self._prepared(operands, options)
        if _is_traced():
            return self._call_traced(args, provider)
        if self._needs_torch(args):
            return self.op(*args, provider)
        kernel = kernel_for(self._name, args[0].device, provider, *self._dtypes(args))
        if modes_active() and not (isinstance(kernel, OpOverload) or transforms_active()):
            return self.op(*args, provider)  # a function that reads memory shows a mode nothing
        result = self._run(kernel, args)
        if key is not None:
            self._keep(key, kernel, operands, args)
        return result

    def _prepared(self, operands: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the kernel, checked."""
        args = self._prepare(*operands, *options)
        device = args[0].device
        for index in self._tensors_at:
            given = args[index]
            if given is None:
                continue
            name = self._names[index]
            if isinstance(given, (list, tuple)):
                for place, tensor in enumerate(given):
                    check_device(f"{name}[{place}]", tensor, self._names[0], device)
            else:
                check_device(name, given, self._names[0], device)
        return args

    def _run(self, kernel: Kernel, args: Sequence[Any]) -> Any:
        """Runs a kernel. Its error is that of torch, also where torch's stable ABI hides what an allocation raised."""
        try:
            return kernel(*args)
        except RuntimeError as error:
            if isinstance(kernel, OpOverload):
                self._raise_allocation_error(error, args)
            raise

    def _raise_allocation_error(self, error: RuntimeError, args: Sequence[Any]) -> None:
        """Raises what torch says of results that do not fit into memory, if that is why a compiled kernel failed.

        The stable ABI turns the exception, torch.OutOfMemoryError on a GPU, into an error code without a reason.
        """
        if _ABI_FAILED not in str(error):
            return
        try:
            self._fake(*args)
        except RuntimeError as reason:
            raise reason from None

    def _raise_unless_refused(
        self, error: RuntimeError, kernel: OpOverload, operands: tuple[Any, ...], options: tuple[Any, ...],
        provider: str | None,
    ) -> None:  # fmt: skip
        """Raises the error of a kernel from the dispatch cache, unless dispatching slowly leads elsewhere."""
        try:
            args = self._prepared(operands, options)
            same = kernel_for(self._name, args[0].device, provider, *self._dtypes(args)) is kernel
        except Exception:
            return  # which is raised again, with the words of the public function
        if same and all(type(tensor) in _MEMORY for tensor in _tensors(operands)):
            self._raise_allocation_error(error, args)
            raise error

    def of_provider(
        self, device: torch.device, provider: str | None, dtypes: Sequence[torch.dtype | None]
    ) -> OpOverload:
        """Returns the op of torch that runs nothing but the kernel of the provider of such calls.

        Args:
            device: Device of the input.
            provider: As in the public functions.
            dtypes: What it computes in, in the order of its arguments; None for what is not given.

        Raises:
            TypeError: as :func:`~diffkern.providers.registry.kernel_for`.
            NoProviderError: as there.
        """
        kernel = kernel_for(self._name, device, provider, *dtypes)
        if isinstance(kernel, OpOverload):
            return kernel
        if kernel not in self._of_kernels:
            given = tuple(dict.fromkeys(dtype for dtype in dtypes if dtype is not None))
            who = re.sub(r"\W", "_", select(self._name, device, given, provider).provider)
            # No defaults: torch does not pass what equals a default on to Python.
            signature = without_defaults(SIGNATURES[self._name])
            self._of_kernels[kernel] = define(f"{self._name}_by_{who}", signature, kernel, self._fake)
        return self._of_kernels[kernel]

    def _keep(self, key: Hashable, kernel: Kernel, operands: tuple[Any, ...], args: tuple[Any, ...]) -> None:
        """Keeps what to call, how many operands it takes, the arguments after them, and the op of torch.

        For a function, no operands, and the dtypes of the tensors that it was chosen for.
        """
        entry: tuple[Kernel, int, tuple[Any, ...], OpOverload | None]
        if not isinstance(kernel, OpOverload):
            if self._takes_lists or dispatch_cache.get(key, (None, 0))[1]:
                return  # the compiled kernel that refused this call is the shorter way for others
            entry = kernel, 0, tuple([_dtype_of(args[index]) for index in self._tensors_at]), None
        elif all(type(given) in _PLAIN_CLASSES and given is arg for given, arg in zip(operands, args, strict=False)):
            needed = self._needed(args)
            shortest = _shortest(kernel, needed)
            if not all(argument.has_default_value() for argument in shortest._schema.arguments[needed:]):
                needed = len(args)  # a build from before they had defaults
            entry = shortest._op, min(len(operands), needed), args[len(operands) : needed], kernel
        else:
            return  # an operand was changed on the way, or is of another library's class
        if len(dispatch_cache) >= _MOST_ENTRIES:
            dispatch_cache.clear()
        dispatch_cache[key] = entry

    def _are_of(self, args: Sequence[Any], dtypes: Sequence[torch.dtype | None]) -> bool:
        """Whether the tensors are of these dtypes, and their memory holds the values themselves."""
        for index, dtype in zip(self._tensors_at, dtypes, strict=True):
            given = args[index]
            if given is None:
                if dtype is not None:
                    return False
            elif given.dtype is not dtype or type(given) not in _MEMORY or given.is_neg():
                return False
        return True

    def _needed(self, args: tuple[Any, ...]) -> int:
        """How many arguments there are without those at the end that have their default."""
        needed = len(args)
        for value, default in zip(reversed(args), reversed(self._optional), strict=False):
            if isinstance(value, Tensor) or value != default:
                break
            needed -= 1
        return needed

    def _call_traced(self, args: tuple[Any, ...], provider: str | None) -> Any:
        if not (_grad_is_enabled() and _wants_gradient(args)):
            held = _op_for_graph(self._name, args[0].device, provider, self._dtypes(args), self._needed(args))
            if held is not None and self._seen_through is not None:
                seen = self._seen_through(*args)
                if seen is not None:
                    return seen
            if held is not None:
                namespace, name, count = held
                register_fallback(namespace, name)
                return getattr(getattr(torch.ops, namespace), name).default(*args[:count])
        if not torch.compiler.is_exporting():
            register_fallback(*self._op_name)
        return self.op(*args, provider)

    def _needs_torch(self, args: Sequence[Any]) -> bool:
        """Whether a call must go through the registered op and not straight to the provider's kernel.

        It must where a mode observes the call instead of running it (tracing, fake tensors), where a gradient is
        wanted, and where the memory does not hold the values themselves. Under transforms that look into the formula,
        the direct way leads to plain PyTorch: see :func:`diffkern.providers.registry.kernel_for`.
        """
        if torch.compiler.is_compiling():
            return True
        if transforms_active():
            return False
        wanted = _grad_is_enabled()
        for index in self._tensors_at:
            given = args[index]
            if given is None:
                continue
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                # A lazy sign is resolved by the dispatcher, and a raw pointer does not show it; nor is a class of
                # the memory of its values another tensor's.
                if type(tensor) not in _MEMORY or tensor.is_neg() or (wanted and tensor.requires_grad):
                    return True
        return False

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*[inputs[index] for index in self._tensors_at])
        for index, name in enumerate(self._names):
            if index not in self._tensors_at:
                setattr(ctx, name, inputs[index])

    def _backward(self, ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = self._gradients(ctx, *grads)
        return (*found, *[None] * (len(self._names) + 1 - len(found)))

    def _reference_gradients(self, ctx: Any, grad: Tensor) -> list[Tensor | None]:
        """Differentiates the unrounded reference, which is computed again rather than kept."""
        saved = ctx.saved_tensors  # read once: gradient checkpointing hands them out once
        dtype, needs = compute_dtype(*saved), needs_grad(ctx, len(saved))
        options = [getattr(ctx, name) for name in self._names[len(saved) :]]
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Expanded to their own shape, so that an argument given twice is differentiated by each by itself.
            wide = [None if tensor is None else tensor.to(dtype).expand_as(tensor) for tensor in saved]
            y = EAGER.kernel(self._name, grad.device)(*wide, *options)
        wanted = [tensor for tensor, needed in zip(wide, needs, strict=True) if needed and tensor is not None]
        found = iter(torch.autograd.grad(y, wanted, grad.to(dtype), create_graph=create_graph))
        return [next(found).to(tensor.dtype) if needed else None for tensor, needed in zip(saved, needs, strict=True)]

    def _compute(self, *given: Any) -> Any:
        """What :attr:`op` runs."""
        *args, provider = self._completed(given)
        return self._run(kernel_for(self._name, args[0].device, provider, *self._dtypes(args)), args)

    def _fake(self, *given: Any) -> Any:
        """The result of a call without data; of :attr:`op`, or of one that has no provider as its last argument."""
        return self._fake_by_name(**dict(zip(self._names, self._completed(given), strict=False)))

    def _completed(self, given: Sequence[Any]) -> list[Any]:
        """The arguments of :attr:`op`; torch leaves out the last ones that have their default."""
        return [*given, *self._defaults[len(given) :]]

    def _dtypes(self, args: Sequence[Any]) -> tuple[torch.dtype | None, ...]:
        """What a kernel computes in, as :meth:`of_provider` takes it."""
        given = [args[index] for index in self._computed_in]
        return tuple([value.dtype if type(value) is Tensor else _dtype_of(value) for value in given])


@constant_in_graphs
def _op_for_graph(
    name: str, device: torch.device, provider: str | None, dtypes: tuple[torch.dtype | None, ...], needed: int
) -> tuple[str, str, int] | None:
    """The op of torch that a graph shall hold, or None for that of diffkern, which chooses at run time.

    ``torch.compile`` runs this while it traces, and takes the result for a constant.

    Returns:
        Namespace and name of the op, and how many arguments of the kernel it takes.
    """
    if torch.compiler.is_exporting() or transforms_active():
        return None
    try:
        held = _shortest(_ops[name].of_provider(device, provider, dtypes), needed)
    except (TypeError, NoProviderError):
        return None  # the run says it
    namespace, _, op = held._schema.name.partition("::")
    return namespace, op, len(held._schema.arguments)


def check_device(name: str, tensor: Tensor, first: str, device: torch.device) -> None:
    """Checks that an operand is on the device of the first one, which is called ``first``.

    Raises:
        ValueError: it is not.
    """
    if tensor.device != device:
        raise ValueError(f"the {name} is on {tensor.device}, and {first} on {device}: move one of them")


def _are_on(device: torch.device, operands: Sequence[Any]) -> bool:
    """Whether all tensors are on the device, also those in lists. It is asked at every call: no generators here."""
    for given in operands:
        kind = type(given)
        if given is None or kind is int:
            continue
        if kind is list:
            for item in given:
                if type(item) is not int and item.device != device:
                    return False
        elif given.device != device:
            return False
    return True


def _wants_gradient(values: Sequence[Any]) -> bool:
    return any([tensor.requires_grad for tensor in _tensors(values)])


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among ``values``, also those in lists."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return tensors


def _dtype_of(value: Any) -> torch.dtype | None:
    """The dtype of a tensor, or of those in a list, or the one that an argument names; else None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, (list, tuple)):
        return _dtype_of(value[0]) if value else None
    return value if isinstance(value, torch.dtype) else None


def _form(kernel: OpOverload, form: str) -> Any:
    """Another form of a compiled op; None where its build has none."""
    namespace, _, name = kernel._schema.name.partition("::")
    return getattr(getattr(torch.ops, namespace), form.format(name), None)


def _shortest(kernel: OpOverload, needed: int) -> OpOverload:
    """The plain form of the op, if it takes the first ``needed`` arguments, else the op itself."""
    plain = _form(kernel, PLAIN)
    return kernel if plain is None or len(plain.default._schema.arguments) < needed else plain.default


def define(
    name: str, signature: str, implementation: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag
) -> OpOverload:
    """Registers ``torch.ops.diffkern.<name>``, which is opaque to ``torch.compile``, and returns its overload.

    Another copy of diffkern in the process may have taken the name: then this copy's op gets a number, so that each
    copy runs its own code.
    """
    space = getattr(torch.ops, NAMESPACE)
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    free = next(candidate for candidate in names if not hasattr(space, candidate))
    qualified = f"{NAMESPACE}::{free}"
    # Not torch.library.custom_op: its first call imports all of torch._dynamo, which takes a second.
    torch.library.define(qualified, signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.impl(qualified, "default", implementation)
    torch.library.register_fake(qualified, fake)
    return getattr(space, free).default  # type: ignore[no-any-return]
