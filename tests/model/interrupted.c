/* As channel, with two packets: one wait of the receiver is ended by a signal, and one because its time is over. */
#define PACKETS 2
#define INTERRUPTED
#include "channel.c"
