"""Microbatch accounting of a step: ledger, assignment after a loss, order of summation."""
