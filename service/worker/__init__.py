"""Workers: from the inbox of a job, through detector and scheduler, to verdicts and plans."""
