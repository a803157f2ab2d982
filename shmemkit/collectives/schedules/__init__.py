"""Schedules: who sends which unit to whom, by any transport of ``device.packets.transports`` that can."""
