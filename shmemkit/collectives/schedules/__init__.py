"""Schedules: who sends which unit to whom, by any transport of ``collectives.transports`` that can."""
