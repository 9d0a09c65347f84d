/* As wander.c, through exclusive handles: each trusts only what it remembers of its own counter. */
#define OPTIONS NNB_MQ_EXCLUSIVE
#include "wander.c"
