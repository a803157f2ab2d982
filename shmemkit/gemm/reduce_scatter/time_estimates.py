"""Whether a product takes long enough to hide its sends: "auto" decides by that."""

from ..sm90_host import CLOCK, estimate

LINKS = 390e9  # bytes per second that a rank's copies send: of H200, measured
LONGER = 3  # times: measured, copies of parts are the faster from between 2.3 and 4.3 on


def outlasts(m, n, k, choice, multiprocessors, sent):
    """-> whether the product, by an estimate, takes ``LONGER`` times as long as the links need to send so
    many bytes"""
    return estimate(m, n, k, choice, multiprocessors) / CLOCK >= LONGER * sent / LINKS
