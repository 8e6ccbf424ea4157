"""Publishing: what lets others load and judge a converted checkpoint, and the attention as a kernel of the Hub."""
