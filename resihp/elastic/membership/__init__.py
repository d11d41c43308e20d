"""How ranks find each other, agree on plans, and settle what holds after a loss."""
