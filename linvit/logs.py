"""What a run says of itself: one line an event, on standard error."""

import logging


def set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.captureWarnings(True)
    for library in ("timm", "fontTools"):  # at work, they tell more than a log of runs needs
        logging.getLogger(library).setLevel(logging.WARNING)
