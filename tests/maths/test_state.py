"""State that is found: what a checkpoint would leave out is refused when a learner is built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_training.algorithms.sac import SAC
from rl_training.models import MLPSACModel
from rl_training.state import Stateful, require_found, transient


class Part(Stateful):
    def __init__(self) -> None:
        self.network = nn.Linear(2, 2)
        self.moment = torch.zeros(1)


@pytest.mark.parametrize(
    "hidden",
    [
        [torch.zeros(1)],
        (torch.zeros(1),),
        {"a": torch.zeros(1)},
        {"a": [(torch.zeros(1),)]},
        [nn.Linear(1, 1)],
        [Part()],
    ],
    ids=["list", "tuple", "mapping", "nested", "network", "part"],
)
def test_tensors_in_a_container_are_refused_unless_marked(hidden: object) -> None:
    part = Part()
    part.memory = hidden  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Part\.memory is a \w+ that holds tensors.*transient"):
        require_found(part)
    part.memory = transient(hidden)  # type: ignore[attr-defined]
    require_found(part)
    assert part.state_dict().keys() == {"network", "moment"}


def test_a_list_of_what_a_part_holds_is_allowed() -> None:
    part = Part()
    part.parameters = [*part.network.parameters(), part.moment]  # type: ignore[attr-defined]
    part.names = ["a", 1, None]  # type: ignore[attr-defined]
    require_found(part)


def test_a_learner_that_hides_a_tensor_cannot_be_built() -> None:
    class Forgetful(SAC):
        def setup(self) -> None:
            super().setup()
            self.history = [torch.zeros(1)]

    with pytest.raises(TypeError, match=r"Forgetful\.history is a list that holds tensors"):
        Forgetful(model=MLPSACModel(3, 1))
