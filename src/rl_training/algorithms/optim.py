"""Optimizers over stacked parameters: Adam (Kingma & Ba, 2015), AdamW, RAdam, SGD, RMSprop, LaProp.

One fused call of Adam updates all tensors of a network, without the per-parameter bookkeeping and
host reads of `torch.optim`.  Because all are element-wise, one optimizer over `[S, ...]` tensors
is S separate ones; only norm clipping mixes elements, and is done per seed.  The learning rate may
differ between seeds.  Their mathematics is that of `torch.optim`, which tests hold them to.

Schedules are functions of progress, the share of the *planned* run that is done, in [0, 1].  A run
that is extended keeps its plan: beyond it every schedule stays at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from rl_training.algorithms.config import LRSchedule, OptimizerSettings
from rl_training.state import (
    PerSeed,
    Scalar,
    Stateful,
    copy_tensor,
    require_same_keys,
    transient,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Limits(TypedDict, total=False):
    """What every optimizer may be told, by the names that `Optimizer` explains."""

    max_grad_norm: float | None
    adaptive_clip: float | None
    warmup: int
    weight_decay: Mapping[Tensor, float] | None


class Optimizer(Stateful):
    """Parameters and their learning rate, which a schedule sets and which may differ by seed."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float | PerSeed,
        *,
        max_grad_norm: float | None = None,
        adaptive_clip: float | None = None,
        warmup: int = 0,
        weight_decay: Mapping[Tensor, float] | None = None,
    ) -> None:
        """Take the parameters.

        Args:
            parameters: Tensors `[S, ...]`.
            learning_rate: Learning rate, of all seeds or of each.
            max_grad_norm: Clip each seed's gradient to this norm.
            adaptive_clip: Clip the gradient of each tensor to this share of the tensor's norm.
            warmup: Steps over which the learning rate grows from 0.
            weight_decay: L2 penalty of single parameters: d adds d p to the gradient of p.
        """
        self.parameters = list(parameters)
        self.rates = learning_rate if isinstance(learning_rate, PerSeed) else None
        # Beside rates per seed, the common one is what a schedule makes of 1.
        self.base_learning_rate = 1.0 if isinstance(learning_rate, PerSeed) else learning_rate
        self.rate = Scalar(self.base_learning_rate, self.parameters[0].device)
        self.max_grad_norm, self.adaptive_clip = max_grad_norm, adaptive_clip
        self.warmup = warmup
        given = weight_decay or {}
        self.decays = [given.get(parameter, 0.0) for parameter in self.parameters]

    def rate_of(self, index: int = 0) -> float:
        """Return the learning rate of a seed now, after its schedule."""
        return self.rate.value * (1.0 if self.rates is None else self.rates.values[index])

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradient of `loss` `[S]` for each parameter, each seed's own."""
        # A fused kernel walks memory, so a gradient must lie in it as its parameter does.
        gradients = torch.autograd.grad(loss if loss.numel() == 1 else loss.sum(), self.parameters)
        return [gradient.contiguous() for gradient in gradients]

    def minimize(self, loss: Tensor, active: Tensor | None = None) -> None:
        """Step down the gradient of `loss` `[S]`; seeds that are not `active` `[S]` stay put."""
        self.apply(self.gradients(loss), active)

    def apply(self, gradients: list[Tensor], active: Tensor | None = None) -> None:
        """Step down given gradients, which may be overwritten."""
        divisor = None
        if self.adaptive_clip is not None:
            clip_adaptively(gradients, self.parameters, self.adaptive_clip)
        if self.max_grad_norm is not None and self.parameters[0].shape[0] == 1:
            # One seed: the step divides by the excess of the norm on its way.
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
            divisor = norm.div_(self.max_grad_norm).clamp_(min=1.0)
        elif self.max_grad_norm is not None:
            clip_per_seed(gradients, self.max_grad_norm)
        with torch.no_grad():
            if active is None:
                self._step(gradients, divisor)
            else:
                self._masked_step(gradients, active, divisor)

    def _step(self, gradients: list[Tensor], divisor: Tensor | None) -> None:
        """Move all seeds; gradients count as divided by `divisor`."""
        raise NotImplementedError

    def _held(self) -> list[Tensor]:
        """Return what a step changes, `[S, ...]` each."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all steps, as if the optimizer had just been made; parameters stay."""
        with torch.no_grad():
            for tensor in self._held()[len(self.parameters) :]:
                tensor.zero_()
            count: Tensor | None = getattr(self, "step_count", None)
            if count is not None:
                count.zero_()

    def _masked_step(
        self, gradients: list[Tensor], active: Tensor, divisor: Tensor | None = None
    ) -> None:
        held = self._held()
        before = [tensor.clone() for tensor in held]
        self._step(gradients, divisor)
        for tensor, old in zip(held, before, strict=True):
            tensor.copy_(torch.where(seed_view(active, tensor.ndim), tensor, old))

    def _warmed(self, rate: Tensor, steps: Tensor) -> Tensor:
        """Return the learning rate after so many steps."""
        return rate * (steps / self.warmup).clamp(max=1.0) if self.warmup else rate


class _Simple(Optimizer):
    """An optimizer that moves one tensor after another, by a direction times the learning rate."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float | PerSeed,
        **options: Unpack[Limits],
    ) -> None:
        super().__init__(parameters, learning_rate, **options)
        if self.warmup:
            self.step_count = torch.zeros((), device=self.parameters[0].device)

    def _zeros(self) -> TensorList:
        return TensorList([torch.zeros_like(p) for p in self.parameters])

    def _step(self, gradients: list[Tensor], divisor: Tensor | None) -> None:
        rate = self.rate.tensor
        if self.warmup:
            self.step_count += 1
            rate = self._warmed(rate, self.step_count)
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if divisor is not None:
                gradient = gradient / divisor
            if self.decays[index]:
                gradient = gradient.add(parameter, alpha=self.decays[index])
            step = self._scaled(rate, gradient, index)
            if self.rates is not None:
                step = step * seed_view(self.rates.tensor, step.ndim)
            parameter.sub_(step)

    def _scaled(self, rate: Tensor, gradient: Tensor, index: int) -> Tensor:
        """Return the step of one tensor, and move its moments on."""
        raise NotImplementedError


class SGD(_Simple):
    """Gradient descent: p <- p - rate b with b <- momentum b + g; Nesterov's takes g + momentum b.

    Without momentum b is the gradient itself.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float | PerSeed,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Limits],
    ) -> None:
        super().__init__(parameters, learning_rate, **options)
        self.momentum, self.nesterov = momentum, nesterov
        if momentum:
            self.velocity = self._zeros()

    def _held(self) -> list[Tensor]:
        return [*self.parameters, *(self.velocity.tensors if self.momentum else ())]

    def _scaled(self, rate: Tensor, gradient: Tensor, index: int) -> Tensor:
        if not self.momentum:
            return rate * gradient
        velocity = self.velocity.tensors[index].mul_(self.momentum).add_(gradient)
        if self.nesterov:
            return rate * gradient.add(velocity, alpha=self.momentum)
        return rate * velocity


class RMSprop(_Simple):
    """RMSprop (Tieleman & Hinton, 2012): p <- p - rate g / (sqrt(v) + eps), v the mean of g^2.

    Centred, v is the variance of g; with momentum the quotients are summed up like a velocity.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float | PerSeed,
        *,
        alpha: float = 0.95,
        eps: float = 1e-5,
        momentum: float = 0.0,
        centered: bool = False,
        **options: Unpack[Limits],
    ) -> None:
        super().__init__(parameters, learning_rate, **options)
        self.alpha, self.eps, self.momentum, self.centered = alpha, eps, momentum, centered
        self.second = self._zeros()
        if centered:
            self.first = self._zeros()
        if momentum:
            self.velocity = self._zeros()

    def _held(self) -> list[Tensor]:
        moments = [self.second]
        moments += [self.first] if self.centered else []
        moments += [self.velocity] if self.momentum else []
        return [*self.parameters, *(tensor for moment in moments for tensor in moment.tensors)]

    def _scaled(self, rate: Tensor, gradient: Tensor, index: int) -> Tensor:
        second = self.second.tensors[index]
        second.mul_(self.alpha).addcmul_(gradient, gradient, value=1 - self.alpha)
        spread = second
        if self.centered:
            first = self.first.tensors[index].lerp_(gradient, 1 - self.alpha)
            spread = second.addcmul(first, first, value=-1).clamp_(min=0)  # below 0 by rounding
        if not self.momentum:
            return rate * gradient / (spread.sqrt() + self.eps)
        quotient = gradient / (spread.sqrt() + self.eps)
        return rate * self.velocity.tensors[index].mul_(self.momentum).add_(quotient)


class Adam(Optimizer):
    """Adam with gradient clipping per seed and an optional mask of seeds to leave alone.

    Decoupled, decay is that of AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101): a parameter
    shrinks by rate d before its step, and its gradient has no part in it.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float | PerSeed,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decoupled: bool = False,
        count_per_seed: bool = False,
        **options: Unpack[Limits],
    ) -> None:
        """Create the state.

        Args:
            parameters: Tensors `[S, ...]`.
            learning_rate: Learning rate, of all seeds or of each.
            betas: Decay of the two moments.
            eps: Added to the root of the second moment.
            decoupled: Let `weight_decay` shrink parameters in place of adding to gradients.
            count_per_seed: Give each seed a step count of its own; needed where a mask lets seeds
                rest and the optimizer is used again afterwards.
            **options: What every `Optimizer` takes.
        """
        super().__init__(parameters, learning_rate, **options)
        assert not (self.warmup and count_per_seed), "one learning rate for all seeds"
        self.betas, self.eps, self.decoupled = betas, eps, decoupled
        self.first = TensorList([torch.zeros_like(p) for p in self.parameters])
        self.second = TensorList([torch.zeros_like(p) for p in self.parameters])
        self.num_seeds = self.parameters[0].shape[0] if count_per_seed else None
        shape = () if self.num_seeds is None else (self.num_seeds,)
        self.step_count = torch.zeros(shape, device=self.parameters[0].device)
        penalties = [0.0] * len(self.decays) if decoupled else self.decays
        self._groups: dict[float, Sequence[int]] = {
            decay: [index for index, own in enumerate(penalties) if own == decay]
            for decay in penalties
        }
        """Which parameters share a decay, of which the kernel takes one."""

    def _step(self, gradients: list[Tensor], divisor: Tensor | None) -> None:
        self.step_count += 1
        rate = self._warmed(self.rate.tensor, self.step_count)
        if self.decoupled:
            self._shrink(rate)
        if self.rates is None:
            self._move(self.parameters, gradients, rate, divisor, self._groups)
            return
        # The kernel takes one rate: it moves zeros, and each seed goes its own share of that.
        directions = [torch.zeros_like(parameter) for parameter in self.parameters]
        for gradient, parameter, decay in zip(gradients, self.parameters, self.decays, strict=True):
            if decay and not self.decoupled:
                gradient.add_(parameter, alpha=decay)  # zeros do not decay
        self._move(directions, gradients, rate, divisor, {0.0: range(len(gradients))})
        for parameter, direction in zip(self.parameters, directions, strict=True):
            parameter.addcmul_(direction, seed_view(self.rates.tensor, parameter.ndim))

    def _shrink(self, rate: Tensor) -> None:
        for parameter, decay in zip(self.parameters, self.decays, strict=True):
            if decay:
                share = decay * rate
                if self.rates is not None:
                    share = share * seed_view(self.rates.tensor, parameter.ndim)
                parameter.mul_(1 - share)

    def _move(
        self,
        tensors: list[Tensor],
        gradients: list[Tensor],
        rate: Tensor,
        divisor: Tensor | None,
        groups: Mapping[float, Sequence[int]],
    ) -> None:
        for decay, group in groups.items():
            every = (tensors, gradients, self.first.tensors, self.second.tensors)
            p, g, first, second = (self._slices([held[i] for i in group]) for held in every)
            torch._fused_adam_(  # the kernel behind torch.optim.Adam
                p,
                g,
                first,
                second,
                [],
                self._steps(len(group)),  # the kernel only reads them
                lr=rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
            )

    def _slices(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors, cut into seeds where these count for themselves."""
        if self.num_seeds is None:
            return tensors
        return [part for tensor in tensors for part in tensor.unbind(0)]

    def _steps(self, count: int) -> list[Tensor]:
        if self.num_seeds is None:
            return [self.step_count] * count
        return list(self.step_count.unbind(0)) * count

    def _held(self) -> list[Tensor]:
        held = [*self.parameters, *self.first.tensors, *self.second.tensors]
        return held if self.num_seeds is None else [*held, self.step_count]


class RAdam(Adam):
    """Rectified Adam (Liu et al., 2020, arXiv:1908.03265, Algorithm 2).

    Adam's step is multiplied by r_t, which makes up for how little the first second moments are
    worth; while even that is not defined (some five steps), the momentum alone is the direction.
    Epsilon is added to the root that is made up for its short past, as by optax, not before.
    """

    def _step(self, gradients: list[Tensor], divisor: Tensor | None) -> None:
        super()._step(gradients, divisor)
        rate = super()._warmed(self.rate.tensor, self.step_count)
        plain = torch.where(self._length() > RADAM_THRESHOLD, 0.0, rate)
        plain = plain / _seen_share(self.betas[0], self.step_count)
        steps = list(torch._foreach_mul(self.first.tensors, plain))
        if self.rates is not None:
            rates = self.rates.tensor
            steps = [step * seed_view(rates, step.ndim) for step in steps]
        torch._foreach_sub_(self.parameters, steps)

    def _length(self) -> Tensor:
        """Return rho_t, the length of a simple average that is worth the second moment."""
        beta = self.betas[1]
        left = torch.exp(self.step_count * math.log(beta))  # beta^t
        return _longest(beta) - 2 * self.step_count * left / _seen_share(beta, self.step_count)

    def _warmed(self, rate: Tensor, steps: Tensor) -> Tensor:
        longest, length = _longest(self.betas[1]), self._length()
        worth = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        rectified = torch.where(length > RADAM_THRESHOLD, worth, 0.0).sqrt()
        return super()._warmed(rate, steps) * rectified


RADAM_THRESHOLD = 5.0
"""Length from which second moments are used, as in PyTorch and optax; the paper has 4."""


def _longest(beta: float) -> float:
    """Return rho_inf, what the length of the average grows to."""
    return 2 / (1 - beta) - 1


class LaProp(Optimizer):
    """LaProp (Ziyin et al., 2020, arXiv:2002.04839, Algorithm 1): momentum of normalised gradients.

        v <- b2 v + (1 - b2) g^2
        m <- b1 m + (1 - b1) g / (sqrt(v / (1 - b2^t)) + eps)
        p <- p - rate (m / (1 - b1^t) + d p)

    Adam divides the momentum, LaProp what enters it, so that a gradient is measured by the spread
    of its own time.  Moments of all parameters lie side by side, `[S, P]`: one operation for
    all.  It is element-wise, and adaptive clipping goes tensor by tensor: several of them with the
    same learning rate are one.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float | PerSeed,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        **options: Unpack[Limits],
    ) -> None:
        """Create the state.

        Args:
            parameters: Tensors `[S, ...]`.
            learning_rate: Learning rate, of all seeds or of each.
            betas: Decay of the momentum and of the mean square.
            eps: Added to the root of the mean square.
            **options: What every `Optimizer` takes.
        """
        super().__init__(parameters, learning_rate, **options)
        self.betas, self.eps = betas, eps
        seeds, device = self.parameters[0].shape[0], self.parameters[0].device
        self.sizes = [parameter.numel() // seeds for parameter in self.parameters]
        self.first = self.parameters[0].new_zeros(seeds, sum(self.sizes))
        self.second = torch.zeros_like(self.first)
        self.step_count = torch.zeros((), device=device)
        self._ends = transient(torch.tensor(self.sizes, device=device).cumsum(0))
        """Where the entries of each parameter end."""

    def apply(self, gradients: list[Tensor], active: Tensor | None = None) -> None:
        """Step down given gradients, which may be overwritten."""
        if self.max_grad_norm is not None:
            clip_per_seed(gradients, self.max_grad_norm)
        with torch.no_grad():
            if active is None:
                self._step(gradients, None)
            else:
                self._masked_step(gradients, active)

    def _step(self, gradients: list[Tensor], divisor: Tensor | None) -> None:
        assert divisor is None
        self.step_count += 1
        rate = self._warmed(self.rate.tensor, self.step_count)
        gradient: Tensor = torch.ops.rl_training.packed(gradients)  # [S, P]
        if self.adaptive_clip is not None:
            scales = adaptive_scales(gradients, self.parameters, self.adaptive_clip)
            # Found for each entry rather than kept: that would be a third of the moments.
            entries = torch.arange(gradient.shape[1], device=gradient.device)
            owners = torch.bucketize(entries, self._ends.value, right=True, out_int32=True)
            gradient = gradient * scales.mT.index_select(1, owners)
        decay, decay_of_square = self.betas
        self.second.mul_(decay_of_square)
        self.second.addcmul_(gradient, gradient, value=1 - decay_of_square)
        root = (self.second / _seen_share(decay_of_square, self.step_count)).sqrt()
        self.first.lerp_(gradient / (root + self.eps), 1 - decay)
        step = self.first * (rate / _seen_share(decay, self.step_count))
        shrink = rate
        if self.rates is not None:
            step = step * seed_view(self.rates.tensor, 2)
            shrink = rate * self.rates.tensor
        parts = [
            part.view(parameter.shape)
            for part, parameter in zip(
                torch.split(step, self.sizes, 1), self.parameters, strict=True
            )
        ]
        for index, (parameter, own) in enumerate(zip(self.parameters, self.decays, strict=True)):
            if own:
                share = own * (shrink if shrink.ndim == 0 else seed_view(shrink, parameter.ndim))
                parts[index] = torch.addcmul(parts[index], parameter, share)
        torch._foreach_sub_(self.parameters, parts)

    def _held(self) -> list[Tensor]:
        return [*self.parameters, self.first, self.second]


def _seen_share(decay: float, steps: Tensor) -> Tensor:
    """Return `1 - decay^t`, without the rounding of a number near 1."""
    return -torch.expm1(steps * math.log(decay))


@torch.library.custom_op("rl_training::packed", mutates_args=())
def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors `[S, ...]` side by side, `[S, P]`: one launch, where a compiler makes many."""
    return torch.cat([tensor.flatten(1) for tensor in tensors], 1)


@_packed.register_fake
def _packed_shape(tensors: Sequence[Tensor]) -> Tensor:
    seeds = tensors[0].shape[0]
    return tensors[0].new_empty(seeds, sum(tensor.numel() // seeds for tensor in tensors))


@torch.library.custom_op("rl_training::norms", mutates_args=())
def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Norms of tensors `[S, ...]` for each seed, `[tensors, S]`, in a few launches."""
    parts = [part for tensor in tensors for part in tensor.unbind(0)]
    return torch.stack(torch._foreach_norm(parts)).view(len(tensors), -1)


@_norms.register_fake
def _norms_shape(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), tensors[0].shape[0])


def make_optimizer(
    settings: OptimizerSettings,
    parameters: Iterable[Tensor],
    learning_rate: float | PerSeed,
    *,
    eps: float,
    count_per_seed: bool = False,
    **options: Unpack[Limits],
) -> Optimizer:
    """Create the optimizer that settings ask for.

    Args:
        settings: Its kind and numbers.
        parameters: Tensors `[S, ...]`.
        learning_rate: Learning rate, of all seeds or of each.
        eps: The method's own, where the settings have none.
        count_per_seed: See `Adam`; the others count nothing.
        **options: What every `Optimizer` takes; `weight_decay` in place of the settings' own.
    """
    held, numbers = list(parameters), settings.numbers()
    decay = numbers.pop("weight_decay")
    if options.get("weight_decay") is None:
        options["weight_decay"] = dict.fromkeys(held, decay)
    if settings.type == "sgd":
        return SGD(held, learning_rate, **numbers, **options)
    numbers.setdefault("eps", eps)
    if settings.type == "rmsprop":
        return RMSprop(held, learning_rate, **numbers, **options)
    if settings.type == "laprop":
        return LaProp(held, learning_rate, **numbers, **options)
    if settings.type == "radam":
        return RAdam(held, learning_rate, **numbers, **options)
    numbers |= {"decoupled": settings.type == "adamw", "count_per_seed": count_per_seed}
    return Adam(held, learning_rate, **numbers, **options)


class TensorList:
    """Tensors that belong together, with a state."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors by position."""
        return {str(index): tensor for index, tensor in enumerate(self.tensors)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the tensors in place."""
        require_same_keys(self.state_dict(), state, "a list of tensors")
        for index, tensor in enumerate(self.tensors):
            copy_tensor(tensor, state[str(index)], f"tensor {index}")


def clip_per_seed(gradients: list[Tensor], max_norm: float) -> Tensor:
    """Scale each seed's gradients in place to at most `max_norm`; returns the norms `[S]`."""
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients])  # [tensors, S]
    norm = squares.sum(0).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(seed_view(scale, gradient.ndim))
    return norm


def clip_adaptively(gradients: list[Tensor], parameters: Sequence[Tensor], clip: float) -> None:
    """Scale gradients in place to at most `clip` times the norm of their parameter, per seed.

    Each tensor by itself (Brock et al., 2021, arXiv:2102.06171, with whole tensors in place of
    units); parameters near 0 count as 1e-3.
    """
    with torch.no_grad():
        scales = adaptive_scales(gradients, parameters, clip)
        for gradient, scale in zip(gradients, scales.unbind(0), strict=True):
            gradient.mul_(seed_view(scale, gradient.ndim))


def adaptive_scales(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], clip: float
) -> Tensor:
    """Return the factors of `clip_adaptively`, `[tensors, S]`."""
    sizes, most = (
        torch.ops.rl_training.norms([tensor.detach() for tensor in tensors])
        for tensors in (gradients, parameters)
    )
    scales: Tensor = (clip * most.clamp(min=1e-3) / sizes.clamp(min=1e-12)).clamp(max=1.0)
    return scales


def minimize_together(loss: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Step down `loss` `[S]` with several optimizers by one pass backwards."""
    every = [parameter for optimizer in optimizers for parameter in optimizer.parameters]
    gradients = torch.autograd.grad(loss if loss.numel() == 1 else loss.sum(), every)
    left = [gradient.contiguous() for gradient in gradients]
    for optimizer in optimizers:
        count = len(optimizer.parameters)
        optimizer.apply(left[:count])
        left = left[count:]


def seed_view(values: Tensor, ndim: int) -> Tensor:
    """View `[S]` as `[S, 1, ...]` with `ndim` axes, to combine it with tensors of that many."""
    return values.view(-1, *[1] * (ndim - 1))


def linear(start: float, end: float, progress: float) -> float:
    """Go from `start` to `end` in a straight line."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def learning_rate_factor(schedule: LRSchedule, progress: float) -> float:
    """Return the factor on the base learning rate."""
    if schedule.type == "linear":
        return linear(schedule.start, schedule.end, progress)
    if schedule.type == "cosine":
        bend = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        return schedule.end + (schedule.start - schedule.end) * bend
    if schedule.type == "step":
        passed = sum(progress >= milestone for milestone in schedule.milestones)
        return schedule.start * schedule.gamma**passed
    return schedule.start
