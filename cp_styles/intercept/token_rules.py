"""Which token each element of an op's result belongs to, from those of its arguments: rules for torch's operators.

A track is an int32 tensor on the host with the dims of a tensor. Each dim has the tensor's size, or 1 where all
elements along it are alike. An element is the index of a token, or -1 for none, -2 where that is not known. None is a
track without any token. So a track is as small as [1, L, 1], whatever is beside the tokens.

Rules are chosen by the name of the operator, or by what torch says of it (pointwise). What has no rule is run once more
with one token changed, on as much of it as is small. Else its result counts as mixed, if it was given several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from cp_styles._compat import tensors_in, tree_map

Track = torch.Tensor | None
MOST = 1 << 24
"""Elements of the largest track, after what is alike has been left out, and of what an op is run on once more."""
_MIXTURES = 1 << 25
"""From here on, numbers are those of elements of several tokens."""


@dataclass(frozen=True)
class Label:
    """What is known of the elements of a tensor.

    Attributes:
        tokens: the token from which each was computed; for one that was computed from several, one of them or none.
        places: the place in this rank's part that each holds without being computed from tokens, as positions do that
            were counted from 0, or taken from the first rows of a table.
        source: the call that made ``places``.
        right: with places, the values that the tensor would have with this rank's positions in their stead. None if
            these are not known.
        mixed: the call that computed elements from several tokens. None: there was none.
        spread: what several tokens were mixed into was elements of tokens again, as in a recurrence, whatever they have
            become. A sum for a loss, or a mean, is none.
        counted: the call that made places, where tokens and their places have come together. None: they have not.
        chosen: the call in a module that took a token of each sequence, and left the others. None: there was none.
        unknown: it was made by something that has no rule.
    """

    tokens: Track = None
    places: Track = None
    source: Any = None
    right: torch.Tensor | None = None
    mixed: Any = None
    spread: bool = False
    counted: Any = None
    chosen: Any = None
    unknown: bool = False

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Label:
        """Of data that was moved: ``move`` is applied to both tracks."""
        tokens = None if self.tokens is None else move(self.tokens)
        places = None if self.places is None else move(self.places)
        return replace(self, tokens=tokens, places=places, right=None)

    @property
    def blank(self) -> bool:
        """Whether nothing of it comes from tokens or places."""
        return self.tokens is None and self.places is None and self.mixed is None and self.counted is None


CLEAN, UNKNOWN = Label(), Label(unknown=True)


class NoRuleError(Exception):
    """No rule says what a result is made of."""


def compressed(track: torch.Tensor) -> torch.Tensor:
    """With size 1 in the dims along which its elements share memory."""
    for dim, (size, stride) in enumerate(zip(track.shape, track.stride(), strict=True)):
        if stride == 0 and size > 1:
            track = track.narrow(dim, 0, 1)
    return track


def in_order(length: int, dims: int = 1, dim: int = 0) -> torch.Tensor:
    """The track of this rank's tokens along a dim, alike in all others."""
    shape = [length if axis == dim else 1 for axis in range(dims)]
    return torch.arange(length, dtype=torch.int32, device="cpu").view(shape)


def by_values(track: torch.Tensor) -> torch.Tensor:
    """With size 1 in the dims along which its elements are equal."""
    for dim, size in enumerate(track.shape):
        if size > 1 and bool((track == track.narrow(dim, 0, 1)).all()):
            track = track.narrow(dim, 0, 1)
    return track


def varies(track: Track) -> bool:
    """Whether there are two tokens in it."""
    return track is not None and int(track.max()) > int(torch.where(track < 0, track.max(), track).min())


def together(a: Track, b: Track) -> tuple[Track, bool]:
    """The track of elements that are computed from those of ``a`` and ``b``; and whether two tokens meet in one."""
    if a is None or b is None or a is b:
        return (b if a is None else a), False
    dims = max(a.ndim, b.ndim)
    a, b = (x.reshape([1] * (dims - x.ndim) + list(x.shape)) for x in (a, b))
    if a.shape == b.shape and torch.equal(a, b):
        return a, False
    if prod(torch.broadcast_shapes(a.shape, b.shape)) > MOST:
        corner = tuple(slice(64) for _ in range(dims))
        if together(a[corner], b[corner])[1]:
            return a, True
        raise NoRuleError
    one = torch.where(a < 0, torch.where(b < 0, torch.minimum(a, b), b), a)
    meet = (a >= 0) & (b >= 0) & (a != b)
    if not bool(meet.any()):
        return one, False
    return torch.where(meet, _mixture(a, b), one), True


def _mixture(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A number for elements of several tokens, most often another one for other tokens."""
    return (a * 31 + b * 17) % _MIXTURES + _MIXTURES


def over(track: Track, dims: Sequence[int]) -> tuple[Track, bool]:
    """The track of elements that are computed from all along ``dims``, which get size 1; and whether tokens meet."""
    if track is None:
        return None, False
    dims = sorted({dim % track.ndim for dim in dims if track.ndim and track.shape[dim % track.ndim] > 1})
    if not dims:
        return track, False
    last = track.amax(dims, keepdim=True)
    first = torch.where(track < 0, last, track).amin(dims, keepdim=True)
    meet = last != first
    if not bool(meet.any()):
        return last, False
    return torch.where(meet, _mixture(first, last), last), True


def _along(track: torch.Tensor, shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """The track with the whole size of a tensor of ``shape`` in ``dims``."""
    return track.expand([shape[dim] if dim in dims else size for dim, size in enumerate(track.shape)])


def _small(*shape: int) -> None:
    if prod(shape) > MOST:
        raise NoRuleError


class LaidOut:
    """A track of all elements of a memory, in dims that its views have: of rows of features, one for each row."""

    def __init__(self, elements: int) -> None:
        self._sizes = [elements]
        self._track = torch.full([1], -1, dtype=torch.int32, device="cpu")

    def read(self, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
        index, dims = self._index(shape, strides, offset)
        whole = self._track.expand([size if dim in dims else -1 for dim, size in enumerate(self._sizes)])
        return by_values(whole[index])

    def write(self, shape: Sequence[int], strides: Sequence[int], offset: int, new: Track) -> None:
        new = torch.full([1] * len(shape), -1, dtype=torch.int32, device="cpu") if new is None else new
        for size, stride in zip(shape, strides, strict=True):
            self._split(stride)
            self._split(size * stride)
        index, dims = self._index(shape, strides, offset, new)
        sizes = [size if dim in dims else 1 for dim, size in enumerate(self._sizes)]
        if prod(sizes) > MOST:
            if bool((self.read(shape, strides, offset) == new).all()):
                return
            raise NoRuleError
        grows = list(self._track.shape) != sizes
        whole = self._track.expand(sizes).clone() if grows else self._track
        whole[index] = new
        self._track = by_values(whole) if grows else whole

    def _split(self, at: int) -> None:
        """Divide the dim in which elements at this distance are, so that there is a dim of this step."""
        step = 1
        for dim in reversed(range(len(self._sizes))):
            size, inner = self._sizes[dim], at // step
            if step < at < step * size and at % step == 0 and size % inner == 0:
                self._sizes[dim : dim + 1] = [size // inner, inner]
                alike = self._track.shape[dim] == 1
                self._track = self._track.unflatten(dim, (1, 1) if alike else (size // inner, inner))
                return
            step *= size

    def _index(self, shape: Sequence[int], strides: Sequence[int], offset: int, new: Track = None) -> Any:
        """Where the elements of a view are, and along which dims of the memory that has to be known: the track varies
        there, or will when ``new`` is written. Dims of the view that are along no such one get size 1."""
        steps = [prod(self._sizes[dim + 1 :]) for dim in range(len(self._sizes))]
        ways = [torch.arange(n if s else 1, device="cpu") * s for n, s in zip(shape, strides, strict=True)]
        spans = list(zip(steps, self._sizes, strict=True))
        along = [[len(((offset + way) // step % size).unique()) for step, size in spans] for way in ways]
        taken = [prod(counts[dim] for counts in along) for dim in range(len(steps))]
        dims = {dim for dim, size in enumerate(self._track.shape) if size > 1}
        odd = any(prod(counts) != len(way) for counts, way in zip(along, ways, strict=True))
        if odd or any(count > size for count, size in zip(taken, self._sizes, strict=True)):  # across dims, or overlaps
            dims, along = {*range(len(steps))}, [[2] * len(steps)] * len(shape)
        elif new is not None:
            varying = [counts for counts, size in zip(along, new.shape, strict=True) if size > 1]
            for dim, size in enumerate(self._sizes):
                if taken[dim] < size or any(counts[dim] > 1 for counts in varying):
                    dims.add(dim)
        where = torch.full([1] * len(shape), offset, device="cpu")
        for axis, (counts, way) in enumerate(zip(along, ways, strict=True)):
            if any(counts[dim] > 1 for dim in dims):
                _small(where.numel() * len(way))
                where = where + way.view([-1 if at == axis else 1 for at in range(len(shape))])
        return tuple(where // step % (size if dim in dims else 1) for dim, (step, size) in enumerate(spans)), dims


def plain_name(func: Any) -> str:
    """The name of an operator, the same for its variants in place, with ``out=``, and that copy. That of another
    library's begins with its namespace."""
    name = func._schema.name.removeprefix("aten::").removeprefix("_c10d_functional::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if name == "index_copy" else name.removesuffix("_copy")


class OpCall:
    """One call of an operator, with what its rule needs. ``length`` is None if places in a part are not to be found."""

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        label_of: Callable[[torch.Tensor], Label],
        where: Callable[..., Any],
        length: int | None,
        positions: torch.Tensor | None,
    ) -> None:
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out
        self.label_of, self.where, self.length, self.positions = label_of, where, length, positions
        self.name = plain_name(func)
        self.tensors = tensors_in((args, kwargs))
        self.inputs = [label_of(x) for x in self.tensors]
        self.pairs = list(zip(self.tensors, self.inputs, strict=True))

    def labels(self) -> Label | list[Label]:
        name, inputs = self.name, self.inputs
        if name in _MADE:
            return UNKNOWN if "empty" in name or name == "resize" else CLEAN
        if name not in _COUNTING and all(label.blank for label in inputs):
            return UNKNOWN if any(label.unknown for label in inputs) else CLEAN
        try:
            rule = _RULES.get(name)
            if rule is None and torch.Tag.pointwise in self.func.tags:
                rule = _pointwise
            if rule is None and self.is_attention:
                rule = _attention
            label = (rule or _tried)(self)
            return label if isinstance(label, list) else self.with_right_values(label)
        except Exception:  # of any kind: the model must not notice
            return self.lost()

    def lost(self) -> Label:
        """Of an operator without a rule. What it makes of several tokens may be mixed, and stays so."""
        tokens, meet = None, False
        for label in self.inputs:
            one, differ = over(label.tokens, range(0 if label.tokens is None else label.tokens.ndim))
            tokens, also = together(tokens, None if one is None else one.reshape([]))
            meet |= differ or also
        if not meet:
            return self.join(tokens, None, False, unknown=True)
        where = self.where(str(self.func._schema.name), outside=True)
        return self.join(None, None, False, inputs=[*self.inputs, Label(mixed=where)])

    @property
    def is_attention(self) -> bool:
        return "scaled_dot_product" in self.name or self.name.endswith("_attention_forward")

    @property
    def has_rule(self) -> bool:
        return self.name in _RULES

    def argument(self, name: str, default: Any = None) -> Any:
        for index, parameter in enumerate(self.func._schema.arguments):
            if parameter.name == name:
                if index < len(self.args):
                    return self.args[index]
                return self.kwargs.get(name, parameter.default_value if parameter.has_default_value() else default)
        return default

    def join(
        self,
        tokens: Track,
        places: Track,
        meet: bool,
        *,
        unknown: bool = False,
        inputs: Sequence[Label] | None = None,
    ) -> Label:
        """The label of a result with these tracks, in which tokens ``meet``; the rest is that of the arguments."""
        inputs = self.inputs if inputs is None else inputs
        mixed = next((label.mixed for label in inputs if label.mixed is not None), None)
        counted = next((label.counted for label in inputs if label.counted is not None), None)
        source = next((label.source for label in inputs if label.places is not None), None)
        if meet and mixed is None:
            mixed = self.where(self.name)
        if tokens is not None and (not tokens.numel() or int(tokens.max()) < 0):
            tokens = None
        if tokens is not None and places is not None:
            if counted is None and _aligned(tokens, places) and not self.is_right():
                counted = source
            places = None
        if tokens is None and places is None and mixed is None and counted is None:
            return UNKNOWN if unknown or any(label.unknown for label in inputs) else CLEAN
        source = None if places is None else source
        chosen = next((label.chosen for label in inputs if label.chosen is not None), None)
        spread = any(label.spread for label in inputs) or (mixed is not None and varies(tokens))
        flags = {"mixed": mixed, "spread": spread, "counted": counted, "chosen": chosen, "unknown": unknown}
        return Label(tokens, places, source, **flags)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Label:
        return self.label_of(self.args[0]).moved(move)

    def is_right(self) -> bool:
        """Whether the arguments that hold places have the values that they would have with positions."""
        placed = [(x, label.right) for x, label in self.pairs if label.places is not None]
        return all(right is not None and torch.equal(x, right) for x, right in placed)

    def with_right_values(self, label: Label) -> Label:
        func, out = self.func, self.out
        if label.places is None or label.right is not None or not isinstance(out, torch.Tensor):
            return label
        right = {id(x): of_x.right for x, of_x in self.pairs if of_x.places is not None}
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags or None in right.values():
            return label
        if not right:
            return label
        args, kwargs = tree_map(lambda x: right.get(id(x), x), (self.args, self.kwargs))
        return replace(label, right=func(*args, **kwargs))

    def merged(self, labels: Sequence[Label]) -> Label:
        tokens = places = None
        meet = lost = False
        for label in labels:
            tokens, differ = together(tokens, label.tokens)
            meet |= differ
            places, differ = together(places, label.places)
            lost |= differ
        return self.join(tokens, None if lost else places, meet, inputs=labels)

    def reduced(self, label: Label, dims: Sequence[int], *, keep: bool) -> Label:
        """Of elements that are computed from all along ``dims``. ``keep``: the result has the size of the argument."""
        tokens, meet = over(label.tokens, dims)
        places, lost = over(label.places, dims)
        if keep and meet:
            tokens = label.tokens
        return self.join(tokens, None if lost else places, meet, inputs=[label])


def _aligned(tokens: torch.Tensor, places: torch.Tensor) -> bool:
    """Whether each element's token is at its place."""
    dims = max(tokens.ndim, places.ndim)
    tokens, places = (x.reshape([1] * (dims - x.ndim) + list(x.shape)) for x in (tokens, places))
    if prod(torch.broadcast_shapes(tokens.shape, places.shape)) > MOST:
        return False
    tokens, places = torch.broadcast_tensors(tokens, places)
    both = (tokens >= 0) & (places >= 0)
    return bool(both.any()) and varies(torch.where(both, places, -1)) and bool((tokens == places)[both].all())


# Rules. Each gets a call and returns the label of its results, or a list of them.


def _pointwise(call: OpCall) -> Label:
    return call.merged(call.inputs)


def _view(call: OpCall) -> Label | list[Label]:
    """What torch makes without a copy is made of the track in the same way."""
    x = call.args[0]
    shape, rest = x.shape, call.args[1:]

    def moved(track: torch.Tensor) -> list[torch.Tensor]:
        labels = call.func(track.expand(shape), *rest, **call.kwargs)
        return [compressed(view) for view in (labels if isinstance(labels, list | tuple) else [labels])]

    label = call.label_of(x)
    count = len(call.out) if isinstance(call.out, list | tuple) else 1
    tokens = [None] * count if label.tokens is None else moved(label.tokens)
    places = [None] * count if label.places is None else moved(label.places)
    labels = [call.join(token, place, False, inputs=[label]) for token, place in zip(tokens, places, strict=True)]
    return labels if isinstance(call.out, list | tuple) else labels[0]


def _slice(call: OpCall) -> Label | list[Label]:
    """Also finds the first rows of a table that was not made from tokens: as many as this rank has tokens."""
    x, length = call.args[0], call.length
    label = call.label_of(x)
    dim = call.argument("dim", 0) % x.ndim
    if not label.blank:
        return _view(call)
    start, step = call.argument("start") or 0, call.argument("step") or 1
    rows = call.out.shape[dim]
    if label.unknown or length is None or rows != length or start != 0 or step != 1 or x.shape[dim] <= length:
        return label
    right, positions = None, call.positions
    if positions is not None and int(positions.max()) < x.shape[dim] and not x.requires_grad:  # or it will be trained
        right = x.index_select(dim, positions.to(x.device))
    words = f"takes the first {length} rows of a table of {x.shape[dim]}"
    return Label(places=in_order(length, call.out.ndim, dim), source=call.where(words), right=right)


def _range(call: OpCall) -> Label:
    out, length = call.out, call.length
    if length is None or out.shape[0] != length:
        return CLEAN
    if call.name == "linspace":
        return Label(places=in_order(length), source=call.where(f"makes {length} numbers inside"))
    if call.argument("start", 0) != 0 or call.argument("step", 1) != 1:
        return CLEAN
    right = None if call.positions is None else call.positions.to(out.device, out.dtype)
    return Label(places=in_order(length), source=call.where(f"makes the numbers 0 to {length - 1} inside"), right=right)


def _view_of_shape(call: OpCall) -> Label:
    """Of reshapes: dims that are alike stay so, and only blocks of dims with tokens are laid out."""
    x, out = call.args[0], call.out
    if not x.numel():
        return UNKNOWN
    if x.dtype != out.dtype:  # view(dtype): the last dim is cut otherwise
        return call.label_of(x).moved(lambda track: _last_alike(track))
    old, new = list(x.shape), list(out.shape)
    blocks = _blocks(old, new)

    def reshaped(track: torch.Tensor) -> torch.Tensor:
        at = 0  # where the dims of a block begin
        for a, b in blocks:
            sizes = [old[dim] for dim in a]
            varying = max((n for n, size in enumerate(track.shape[at : at + len(a)], 1) if size > 1), default=0)
            before, behind = list(track.shape[:at]), list(track.shape[at + len(a) :])
            rows, alike = prod(sizes[:varying]), prod(sizes[varying:])
            _small(*before, rows, *behind)
            track = track.expand([*before, *sizes[:varying], *[1] * (len(a) - varying), *behind])
            track, n = track.reshape([*before, rows, *behind]), 0
            while varying and alike % (inner := prod(new[dim] for dim in b[n:])):
                # The rows of one token, such as its heads, are alike. So they need not be laid out with their elements.
                count, odd = divmod(inner, alike)
                runs = None if odd or rows % count else track.unflatten(at, (-1, count))
                if runs is not None and bool((runs == runs.narrow(at + 1, 0, 1)).all()):
                    track, rows, alike = runs.select(at + 1, 0), rows // count, inner
                else:
                    n += 1
            outer = [new[dim] for dim in b[:n]] if varying else []
            _small(*before, *outer, *behind)
            track = track.unsqueeze(at + 1).expand([*before, rows, prod(outer) // rows if varying else 1, *behind])
            track = track.reshape([*before, *outer, *[1] * (len(b) - len(outer)), *behind])
            at += len(b)
        return track

    return call.label_of(x).moved(lambda track: by_values(reshaped(track)))


def _blocks(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    blocks, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        a, b = [], []
        left = right = 1
        if i < len(old):
            a, left, i = [i], old[i], i + 1
        if j < len(new):
            b, right, j = [j], new[j], j + 1
        while left != right:
            if (left < right and i < len(old)) or j >= len(new):
                a.append(i)
                left, i = left * old[i], i + 1
            else:
                b.append(j)
                right, j = right * new[j], j + 1
        blocks.append((a, b))
    return blocks


def _last_alike(track: torch.Tensor) -> torch.Tensor:
    if track.shape[-1] > 1:
        raise NoRuleError
    return track


def _roll(call: OpCall) -> Label:
    shifts, dims = call.args[1], call.argument("dims", ())
    if not dims:
        raise NoRuleError
    return call.moved(lambda track: track.roll(shifts, dims))


def _repeat(call: OpCall) -> Label:
    times = list(call.args[1])

    def move(track: torch.Tensor) -> torch.Tensor:
        whole = track.reshape([1] * (len(times) - track.ndim) + list(track.shape))
        return whole.repeat([time if size > 1 else 1 for time, size in zip(times, whole.shape, strict=True)])

    return call.moved(move)


def _joined(call: OpCall, tensors: Sequence[torch.Tensor], labels: Sequence[Label], dim: int) -> Label:
    tokens, places = [label.tokens for label in labels], [label.places for label in labels]
    others = [-2 if label.unknown else -1 for label in labels]
    return call.join(_join(tensors, tokens, dim, others), _join(tensors, places, dim, others), False)


def _join(tensors: Sequence[torch.Tensor], tracks: Sequence[Track], dim: int, others: Sequence[int]) -> Track:
    if all(track is None for track in tracks):
        return None
    whole = [
        torch.full([1] * x.ndim, other, dtype=torch.int32, device="cpu") if track is None else track
        for x, track, other in zip(tensors, tracks, others, strict=True)
    ]
    if all(track.shape[dim] == 1 for track in whole):
        first = whole[0]
        if all(track.shape == first.shape and torch.equal(track, first) for track in whole[1:]):
            return first
    sizes = [max(track.shape[d] for track in whole) for d in range(whole[0].ndim)]
    parts = [
        track.expand([x.shape[d] if d == dim else size for d, size in enumerate(sizes)])
        for x, track in zip(tensors, whole, strict=True)
    ]
    _small(sum(part.numel() for part in parts))
    return torch.cat(parts, dim)


def _cat(call: OpCall) -> Label:
    tensors = [x for x in call.args[0] if x.ndim > 1 or x.numel()]
    dim = call.argument("dim", 0) % tensors[0].ndim
    labels = [call.label_of(x) for x in tensors]
    return _joined(call, tensors, labels, dim)


def _stack(call: OpCall) -> Label:
    if all(x.ndim == 0 for x in call.args[0]):  # sums of chunks of a loss, which are no tokens again
        return call.merged(call.inputs).moved(lambda track: track.reshape(1))
    tensors = [x.unsqueeze(0) for x in call.args[0]]
    labels = [call.label_of(x).moved(lambda track: track.unsqueeze(0)) for x in call.args[0]]
    dim = call.argument("dim", 0) % tensors[0].ndim
    return _joined(call, tensors, labels, 0).moved(lambda track: track.movedim(0, dim))


def _pad(call: OpCall) -> Label:
    x, pads = call.args[0], list(call.args[1])
    padded = [x.ndim - 1 - index for index in range(len(pads) // 2) if pads[2 * index] or pads[2 * index + 1]]

    def move(track: torch.Tensor) -> torch.Tensor:
        # What is beside the features of a token counts as made of it.
        dims = [dim for dim in padded if track.shape[dim] > 1 or x.shape[dim] == 1]
        own = [pad if x.ndim - 1 - index // 2 in dims else 0 for index, pad in enumerate(pads)]
        whole = _along(track, x.shape, dims)
        _small(*whole.shape)
        return torch.constant_pad_nd(whole, own, -1)

    return call.label_of(x).moved(move)


def _gather(call: OpCall) -> Label:
    x, dim, index = call.args[0], call.args[1], call.args[2]
    label = call.label_of(x)
    if label.blank:
        return UNKNOWN if label.unknown else call.label_of(index)
    dim %= x.ndim

    def move(track: torch.Tensor) -> torch.Tensor:
        if track.shape[dim] == 1:
            return _narrowed(track, index.shape)
        rows, sizes = _rows(x, dim, index, track)
        sizes[dim] = x.shape[dim]
        return by_values(_narrowed(track, sizes).expand(sizes).gather(dim, rows))

    return call.merged([label.moved(move), *_chosen(label, dim, call.label_of(index))])


def _chosen(label: Label, dim: int, index: Label) -> list[Label]:
    """What an index adds to what it takes along ``dim``: classes by labels have tokens, too."""
    # An order of tokens, applied to tokens, adds nothing, unless it leaves out those that others of this rank surpass.
    differ = any(track is not None and track.shape[dim] > 1 for track in (label.tokens, label.places))
    return [index] if not differ or getattr(index.mixed, "words", "") == "topk" else []


def _rows(x: torch.Tensor, dim: int, index: torch.Tensor, *tracks: Track) -> tuple[torch.Tensor, list[int]]:
    """An index into ``x`` along a dim, on the host and with size 1 in the others where it and the tracks are alike; and
    in which dims it has that size, as 1, or that of ``index``."""
    rows = by_values(compressed(index))
    sizes = list(index.shape)
    for other, size in enumerate(index.shape):
        alike = rows.shape[other] == 1 and all(track is None or track.shape[other] == 1 for track in tracks)
        if other != dim and alike and size == x.shape[other]:
            sizes[other] = 1
    _small(*sizes)
    return rows.cpu().expand(sizes), sizes


def _narrowed(track: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return track[tuple(slice(size) for size in shape)]


def _places_in(x: torch.Tensor, indices: Sequence[Any]) -> tuple[list[Any], list[int], int]:
    """The indices on the host, one for each dim of ``x`` that they take; these dims; and how many dims come before."""
    selectors, dims, dim = [], [], 0
    for index in indices:
        if index is None:
            selectors.append(slice(None))
            dim += 1
        else:
            wide = index.ndim if index.dtype in (torch.bool, torch.uint8) else 1
            selectors.append(index.cpu())
            dims += range(dim, dim + wide)
            dim += wide
    return selectors, dims, dims[0] if dims and dims == list(range(dims[0], dims[-1] + 1)) else 0


def _index(call: OpCall) -> Label:
    x, indices = call.args[0], call.args[1]
    if call.name == "index_select":
        indices = [*[None] * (indices % max(x.ndim, 1)), call.args[2]]
    elif isinstance(indices, torch.Tensor):  # a mask for each element, or rows of a table
        indices = [indices.expand(x.shape) if call.name == "masked_select" else indices]
    label = call.label_of(x)
    selectors, dims, before = _places_in(x, indices)
    tensors = [index for index in indices if index is not None]
    after = call.out.ndim - before - max(index.ndim for index in tensors)

    def at_its_dims(of_index: Label) -> Label:
        return of_index.moved(lambda track: track.reshape([1] * before + list(track.shape) + [1] * after))

    if label.blank:
        if label.unknown or any(index.dtype == torch.bool for index in tensors):
            return UNKNOWN
        return at_its_dims(call.merged([call.label_of(index) for index in tensors]))

    def move(track: torch.Tensor) -> torch.Tensor:
        whole = _along(track, x.shape, dims)
        picked = whole[tuple(selectors)]
        _small(*picked.shape)
        return by_values(picked)

    pairs = zip(dims, tensors, strict=True) if len(dims) == len(tensors) else ()  # a mask takes several dims
    chosen = [at_its_dims(made) for dim, index in pairs for made in _chosen(label, dim, call.label_of(index))]
    return call.merged([label.moved(move), *chosen])


def _index_put(call: OpCall) -> Label:
    x, indices, values = call.args[0], call.args[1], call.args[2]
    adds = bool(call.argument("accumulate", False))
    base, new = call.label_of(x), call.label_of(values)
    if base.blank and new.blank:
        raise NoRuleError
    selectors, dims, _ = _places_in(x, indices)
    if new == CLEAN and prod(x.shape[dim] for dim in dims) > MOST:  # constants count as what they have replaced
        return base
    tokens, meet = _put(x.shape, base.tokens, new.tokens, tuple(selectors), dims, adds)
    return call.join(tokens, None, meet, inputs=[base, new])


def _put(
    shape: Sequence[int], base: Track, new: Track, index: tuple[Any, ...], dims: Sequence[int], adds: bool
) -> tuple[Track, bool]:
    """The track of a tensor of ``shape`` into which another one is put, at an ``index`` that has all of ``dims``; and
    whether tokens meet."""
    base = torch.full([1] * len(shape), -1, dtype=torch.int32, device="cpu") if base is None else base
    new = torch.full([], -1, dtype=torch.int32, device="cpu") if new is None else new
    sizes = [shape[dim] if dim in dims else size for dim, size in enumerate(base.shape)]
    old = base.expand(sizes)[index].shape
    if new.ndim > len(old) or any(n > 1 and n > o for n, o in zip(new.shape[::-1], old[::-1], strict=False)):
        sizes = list(shape)  # the new one has tokens along dims in which the old one has none
    _small(*sizes)
    whole = base.expand(sizes).clone()
    old = whole[index]
    new = new.expand_as(old) if new.numel() == 1 or new.shape != old.shape else new
    written = torch.where(new < 0, old, new) if adds else new.clone()
    meet = adds and bool(((old >= 0) & (new >= 0) & (old != new)).any())
    whole[index] = written
    meet |= adds and bool((whole[index] != written).any())
    return by_values(whole), meet


def _scatter(call: OpCall) -> Label:
    x, dim, index = call.args[:3]
    dim %= max(x.ndim, 1)
    source = call.argument("src", call.argument("source"))
    labels = [call.label_of(y) for y in (x, index, source) if isinstance(y, torch.Tensor)]
    tracks = [track for label in labels for track in (label.tokens, label.places)]
    if call.name.startswith("index"):  # of whole rows, and one row may be all that there is
        index = index.reshape([-1] + [1] * (x.ndim - 1 - dim)).expand_as(source)
    elif all(track is None or track.shape[dim] == 1 for track in tracks):
        return call.merged(labels)
    base, new = labels[0], labels[2] if len(labels) > 2 else CLEAN
    if base.blank and new.blank:
        raise NoRuleError  # where they are put may depend on tokens
    rows, sizes = _rows(x, dim, index, base.tokens, new.tokens)
    cells = [in_order(size, x.ndim, at).long() for at, size in enumerate(sizes)]
    cells[dim] = rows
    adds = "add" in call.name or "reduce" in call.name
    put = None if new.tokens is None else _narrowed(new.tokens, sizes).expand(sizes)
    whole = [1 if sizes[at] == 1 < index.shape[at] else size for at, size in enumerate(x.shape)]
    tokens, meet = _put(whole, base.tokens, put, tuple(cells), range(x.ndim), adds)
    return call.join(tokens, None, meet, inputs=[base, new])


def _reduce(call: OpCall) -> Label:
    x = call.args[0]
    dims = call.argument("dim")
    names = [argument.name for argument in call.func._schema.arguments]
    if "dim" not in names or dims is None or dims == []:
        dims = list(range(x.ndim))
    dims = [dims] if isinstance(dims, int) else list(dims)
    label = call.reduced(call.label_of(x), dims, keep=False)
    if not x.ndim or bool(call.argument("keepdim", False)) or "dim" not in names:
        return label if "dim" in names else label.moved(lambda track: track.reshape([]))
    gone = {dim % x.ndim for dim in dims}
    return label.moved(lambda track: track.reshape([size for dim, size in enumerate(track.shape) if dim not in gone]))


def _loss_of_classes(call: OpCall) -> list[Label]:
    """Of one class for each token, which its label chooses: labels that were shifted are those of other tokens."""
    x, target = call.args[:2]
    dim = min(x.ndim - 1, 1)
    logits = call.reduced(call.label_of(x), [dim], keep=False).moved(lambda track: track.squeeze(dim))
    label = call.merged([logits, call.label_of(target)])
    if call.argument("reduction"):
        label = call.reduced(label, range(target.ndim), keep=False).moved(lambda track: track.reshape([]))
    return [label, UNKNOWN]


def _along_dim(call: OpCall) -> Label:
    """Each element is computed from all along a dim: softmax, cumulative sums, sorting."""
    x = call.args[0]
    dims = call.argument("dim", -1)
    dims = [dims] if isinstance(dims, int) else list(dims)
    label = call.label_of(x)
    if label.blank:
        return _cumulative(call, x, dims)
    reduced = call.reduced(label, dims, keep=True)
    out = tensors_in(call.out)[0]
    return reduced.moved(lambda track: _narrowed(track, out.shape))  # topk, and transforms of real numbers, are shorter


def _cumulative(call: OpCall, x: torch.Tensor, dims: Sequence[int]) -> Label:
    """A sum along as many numbers as this rank has tokens, which were not made from tokens, counts."""
    dim, label = dims[0], call.label_of(x)
    if label.unknown or call.length is None or not x.ndim or x.shape[dim] != call.length:
        return label
    where = call.where(f"counts {call.length} places")
    return Label(places=in_order(call.length, x.ndim, dim % x.ndim), source=where)


def _product(call: OpCall) -> Label:
    name = call.name
    operands = [x for x in call.args if isinstance(x, torch.Tensor)]
    a, b = operands[1:3] if name in ("addmm", "baddbmm", "addmv") else operands[:2]
    left, right = call.label_of(a), call.label_of(b)
    vector = b.ndim == 1
    tokens, meet = _times(left.tokens, right.tokens, vector)
    places, lost = _times(left.places, right.places, vector)
    product = call.join(tokens, None if lost else places, meet, inputs=[left, right])
    if name.startswith(("add", "baddbmm")) and call.argument("beta", 1):  # with 0 it is not read
        return call.merged([product, call.label_of(operands[0])])
    return product


def _times(left: Track, right: Track, vector: bool) -> tuple[Track, bool]:
    left, meet = over(left, [-1])
    right, meet_right = over(right, [-1] if vector else [-2])
    if vector:
        left, right = (None if x is None else x.squeeze(-1) for x in (left, right))
    if left is not None and int(left.max()) < 0:
        left = None
    if right is not None and int(right.max()) < 0:
        right = None
    track, differ = together(left, right)
    return (left if differ else track), meet or meet_right or differ


def _attention(call: OpCall) -> Label:
    q, k, v = (call.label_of(x) for x in call.args[:3])
    rows, _ = over(q.tokens, [-1])
    meet = any(over(label.tokens, [-2])[1] for label in (k, v))
    return call.join(rows, None, meet, inputs=[q, k, v])


def _norm(call: OpCall) -> list[Label]:
    x, shape = call.args[:2]
    first = x.ndim - len(shape) if isinstance(shape, list | tuple) else 1
    return [call.reduced(call.label_of(x), range(first, x.ndim), keep=True), UNKNOWN, UNKNOWN]


def _batch_norm(call: OpCall) -> list[Label]:
    """Over all but the channels, unless it takes the statistics that it has kept."""
    x = call.args[0]
    training = call.argument("training", call.argument("train", "no_training" not in call.name))
    dims = [dim for dim in range(x.ndim) if dim != 1] if training or "with_update" in call.name else []
    return [call.reduced(call.label_of(x), dims, keep=True), *[UNKNOWN] * 4]


def _convolution(call: OpCall) -> Label:
    """A kernel of width 1 works by element; a wider one mixes what lies along its dim."""
    x, weight = call.args[:2]
    label, out = call.label_of(x), call.out
    spatial = range(weight.ndim - 2)
    whole = x if x.ndim == weight.ndim else x.unsqueeze(0)
    track = label.tokens if x.ndim == weight.ndim or label.tokens is None else label.tokens.unsqueeze(0)
    track, meet = over(track, [1])
    strides = call.argument("stride", [1])
    if track is None:
        # Of an image or a video it is not known along which dim it is cut. Patches beside each other need no others.
        if label.unknown and weight.ndim > 3:
            apart = [strides[index % len(strides)] >= weight.shape[index + 2] for index in spatial]
            if not all(apart) or any(call.argument("padding", [0])):
                return replace(call.join(None, None, True, inputs=[label]), spread=True)
        return call.join(None, None, meet, inputs=[label])
    for index in spatial:
        dim = index + 2
        if track.shape[dim] == 1:
            continue
        width, stride = weight.shape[dim], strides[index % len(strides)]
        meet |= width > 1 and varies(track)
        rows = torch.arange(out.shape[dim - whole.ndim], device="cpu") * (
            stride if not call.argument("transposed", False) else 1
        )
        track = track.index_select(dim, rows.clamp(max=track.shape[dim] - 1))
    return call.join(track if x.ndim == weight.ndim else track.squeeze(0), None, meet, inputs=[label])


def _recurrence(call: OpCall) -> list[Label]:
    x = call.args[0]
    label = call.label_of(x)
    outs = tensors_in(call.out)
    tokens, _ = over(label.tokens, [-1])
    return [
        call.join(tokens if not index else None, None, varies(tokens), inputs=[label]) for index in range(len(outs))
    ]


def _tried(call: OpCall) -> list[Label]:
    # The op alone, on arguments with one token changed: which elements change? It is below autograd and modules, so
    # nothing notices it. Only operators that change nothing and draw no numbers; other libraries' do not come here.
    func, tokens = call.func, None
    for label in call.inputs:
        tokens, meet = together(tokens, label.tokens)
        if meet:
            raise NoRuleError
    if tokens is None or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        raise NoRuleError
    token = int(tokens.max()) // 2

    def run(change: bool) -> list[torch.Tensor]:
        def argument(x: Any) -> Any:
            track = call.label_of(x).tokens if isinstance(x, torch.Tensor) else None
            if track is None:
                return x
            for dim, size in enumerate(x.shape):  # of sequences and features that are alike, some are enough
                if track.shape[dim] == 1 and x.numel() > 2 * MOST:
                    x = x.narrow(dim, 0, max(1, size * 2 * MOST // x.numel()))
            other = x + x.abs() + 1 if x.is_floating_point() else x.amax() - x if x.dtype != torch.bool else ~x
            return torch.where((track == token).to(x.device), other, x) if change else x

        return tensors_in(func(*tree_map(argument, call.args), **tree_map(argument, call.kwargs)))

    labels = [_seen(call, tokens, token, *pair) for pair in zip(run(False), run(True), strict=True)]
    if all(label.blank for label in labels):  # numbers that show nothing prove nothing
        raise NoRuleError
    return labels


def _seen(call: OpCall, tokens: torch.Tensor, token: int, out: torch.Tensor, again: torch.Tensor) -> Label:
    """Of a result, from what has changed in it with one token of those of the arguments."""
    differ = ((again != out) & ~(again.isnan() & out.isnan())).cpu()
    if not bool(differ.any()):
        return UNKNOWN
    dims = [dim for dim, size in enumerate(tokens.shape) if size > 1]
    tracks = [tokens] if tokens.ndim == out.ndim and all(out.shape[dim] == tokens.shape[dim] for dim in dims) else []
    if len(dims) == 1:
        same = [dim for dim in range(out.ndim) if out.shape[dim] == tokens.numel()]
        tracks += [tokens.view([-1 if axis == dim else 1 for axis in range(out.ndim)]) for dim in same]
    for track in tracks:
        if not bool((differ & (track != token)).any()):
            return call.join(track, None, False)
    if tracks or tokens.ndim != out.ndim:
        return call.join(tracks[0] if tracks else None, None, True)
    for dim in dims:  # more or fewer of them, as in pooling
        rows = torch.arange(out.shape[dim], device="cpu") * tokens.shape[dim] // out.shape[dim]
        tokens = tokens.index_select(dim, rows)
    lines = differ.sum([dim for dim in range(out.ndim) if dim not in dims])
    return call.join(tokens, None, int((lines > 0).sum()) > 1)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MADE = _names(
    """zeros ones full empty empty_strided rand randn randint randperm eye scalar_tensor zeros_like ones_like
    full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty new_empty_strided zero
    uniform exponential random log_normal cauchy geometric _efficientzerotensor resize tril_indices triu_indices
    logspace hann_window"""
)
"""Made from no tensor's values."""
MEMORY = _names("empty empty_strided empty_like new_empty new_empty_strided zeros zeros_like new_zeros")
"""Of these, what has no values of interest: others are written to it, by operators or by kernels outside of torch."""

_COUNTING = _names("arange linspace slice cumsum cumprod logcumsumexp")

_NAMES: dict[Callable[[OpCall], Any], str] = {
    _pointwise: """clone _to contiguous lift lift_fresh native_dropout dropout tril triu masked_fill bernoulli
        complex polar abs bucketize searchsorted poisson rrelu rrelu_with_noise
        __and__ __or__ __xor__ __lshift__ __rshift__ floor_divide
        dequantize nan_to_num real imag _conj conj resolve_conj resolve_neg _neg_view where to""",
    _view: """transpose t permute unsqueeze squeeze expand select diagonal unfold split split_with_sizes unbind
        chunk alias detach movedim swapaxes swapdims narrow unsafe_split unsafe_chunk unsafe_split_with_sizes""",
    _view_of_shape: "view _unsafe_view reshape flatten unflatten _reshape_alias view_as",
    _slice: "slice",
    _range: "arange linspace",
    _roll: "roll",
    _repeat: "repeat",
    _cat: "cat concat",
    _stack: "stack",
    _pad: "constant_pad_nd",
    _gather: "gather",
    _index: "index _unsafe_index index_select embedding masked_select",
    _index_put: "index_put _index_put_impl",
    _scatter: "scatter scatter_add scatter_reduce index_add index_copy",
    _reduce: """sum mean amax amin max min prod any all argmax argmin logsumexp norm linalg_vector_norm var std var_mean
        std_mean aminmax median nanmedian nansum nanmean kthvalue mode count_nonzero""",
    _along_dim: """_softmax _log_softmax softmax log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp
        sort topk argsort glu _fft_r2c _fft_c2c _fft_c2r""",
    _product: """mm bmm addmm baddbmm mv addmv dot vdot matmul _int_mm _scaled_mm
        _grouped_mm _scaled_grouped_mm transformers::grouped_mm_fallback""",
    _loss_of_classes: "nll_loss_forward nll_loss2d_forward",
    _norm: "native_layer_norm _fused_rms_norm native_group_norm",
    _batch_norm: """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
        _batch_norm_with_update cudnn_batch_norm miopen_batch_norm batch_norm""",
    _convolution: "convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution",
    _recurrence: "mkldnn_rnn_layer _cudnn_rnn miopen_rnn",
    OpCall.lost: "unique _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount histc",
    lambda call: UNKNOWN: "nonzero _local_scalar_dense",
    lambda call: call.merged([call.label_of(x) for x in tensors_in([*map(call.argument, ("mean", "std"))])]): "normal",
    lambda call: call.label_of(call.args[1]): "copy",
    lambda call: call.label_of(call.args[1]) if isinstance(call.args[1], torch.Tensor) else CLEAN: "fill",
    lambda call: call.merged([call.label_of(x) for x in call.args[:2]]): "masked_scatter",
    lambda call: call.merged([call.label_of(x) for x in tensors_in([call.args[0], call.args[3]])]): "index_fill",
    lambda call: call.reduced(call.label_of(call.args[0]), [-1], keep=False): "linear multinomial",
    lambda call: call.moved(lambda track: track.unsqueeze(-1)): "view_as_real",
    lambda call: call.moved(lambda track: _last_alike(track).squeeze(-1)): "view_as_complex",
    lambda call: call.moved(lambda track: track.flip(call.args[1])): "flip",
}
_RULES = {name: rule for rule, names in _NAMES.items() for name in _names(names)}
