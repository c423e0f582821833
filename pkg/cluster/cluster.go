// Package cluster connects the hosts of a team through NATS JetStream.
//
// It owns what the hosts agree on: who belongs to the cluster, which host runs which task, and
// the record of each task. It decides by compare-and-set on sequence numbers of JetStream, never by
// a clock that may have been set. What a host does with its own tasks and sessions is not its
// business: the other packages do that, and know nothing of NATS.
package cluster

import "errors"

// These errors are returned wrapped.
var (
	ErrConflict = errors.New("it was changed meanwhile")
	ErrNone     = errors.New("it does not exist")
	ErrDamaged  = errors.New("it is damaged") // by a host with a fault, or a hostile one
)
