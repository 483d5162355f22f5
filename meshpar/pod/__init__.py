"""Processes of a pod: launch, agreement, watchdog, pace and signals."""
