"""How torch's device numbers map to cards before CUDA is initialised: by the visible-devices variables."""

from __future__ import annotations

from collections.abc import Mapping

CUDA = ("CUDA_VISIBLE_DEVICES",)
HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def visible_card(environment: Mapping[str, str], names: tuple[str, ...], device_index: int) -> int | str | None:
    """The card that will get number `device_index`: its own index or its (perhaps abbreviated) UUID; None if hidden.

    As CUDA reads the variable: a list ends at the first entry that is neither a card's number nor an identifier.
    """
    listed = next((environment[name] for name in names if name in environment), None)
    if listed is None:
        return device_index
    cards: list[int | str] = []
    for entry in listed.split(","):
        card = entry.strip()
        if card.isdigit():
            cards.append(int(card))
        elif card.startswith(("GPU-", "MIG-")):
            cards.append(card)
        else:
            break
    return cards[device_index] if 0 <= device_index < len(cards) else None
