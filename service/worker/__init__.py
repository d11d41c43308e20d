"""Workers: from the messages of a job, through detector and scheduler, to verdicts and plans."""
