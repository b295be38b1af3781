"""Arm cores by the numbers that /proc/cpuinfo gives: their names, and which of them are the small ones of a mixed chip."""

from __future__ import annotations

ARM, QUALCOMM, APPLE = 0x41, 0x51, 0x61

# (implementer, part) -> name
NAMES = {
    (ARM, 0xD03): "Cortex-A53",
    (ARM, 0xD04): "Cortex-A35",
    (ARM, 0xD05): "Cortex-A55",
    (ARM, 0xD07): "Cortex-A57",
    (ARM, 0xD08): "Cortex-A72",
    (ARM, 0xD09): "Cortex-A73",
    (ARM, 0xD0A): "Cortex-A75",
    (ARM, 0xD0B): "Cortex-A76",
    (ARM, 0xD0C): "Neoverse-N1",
    (ARM, 0xD0D): "Cortex-A77",
    (ARM, 0xD40): "Neoverse-V1",
    (ARM, 0xD41): "Cortex-A78",
    (ARM, 0xD44): "Cortex-X1",
    (ARM, 0xD46): "Cortex-A510",
    (ARM, 0xD47): "Cortex-A710",
    (ARM, 0xD48): "Cortex-X2",
    (ARM, 0xD49): "Neoverse-N2",
    (ARM, 0xD4D): "Cortex-A715",
    (ARM, 0xD4E): "Cortex-X3",
    (ARM, 0xD4F): "Neoverse-V2",
    (ARM, 0xD80): "Cortex-A520",
    (ARM, 0xD81): "Cortex-A720",
    (ARM, 0xD82): "Cortex-X4",
    (APPLE, 0x022): "Icestorm",
    (APPLE, 0x023): "Firestorm",
    (APPLE, 0x032): "Blizzard",
    (APPLE, 0x033): "Avalanche",
}

SMALL = {(ARM, 0xD03), (ARM, 0xD04), (ARM, 0xD05), (ARM, 0xD46), (ARM, 0xD80)} | {(QUALCOMM, part) for part in (0x801, 0x803, 0x805)}
SMALL |= {(APPLE, part) for part in (0x022, 0x024, 0x028, 0x032, 0x034, 0x038)}
SMALL_SPEED = 0.4  # of a large core: about what the kernel says of an A55 beside an A76


def part_name(implementer: int, part: int) -> str:
    return NAMES.get((implementer, part), f"Arm core {implementer:#04x}/{part:#05x}")


def part_speed(implementer: int, part: int) -> float:
    """Relative speed: 1 for a large core."""
    return SMALL_SPEED if (implementer, part) in SMALL else 1.0
