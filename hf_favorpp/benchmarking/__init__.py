"""Time converted attention beside softmax, alone and in whole models: what recipes and the command line share."""
