"""Expected times of records: by their lengths, or by the times of other stages."""
