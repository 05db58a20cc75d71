"""The training loop and its parts: step, optimizer, schedule, checkpoint, log."""
