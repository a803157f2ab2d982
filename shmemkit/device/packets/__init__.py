"""Packets that carry their own flag: they show by themselves that they have arrived in a peer's memory."""
