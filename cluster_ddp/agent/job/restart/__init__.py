"""What follows a failure: whether, where and with which nodes the ranks are started again."""
