"""What a record should have taken: by its lengths, or by what other stages took."""
