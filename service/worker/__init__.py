"""Workers: from a job's messages, through detector and scheduler, to verdicts and plans."""
