package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
)

// A cluster starts with one core and a witness. Once it has three cores, its streams are copied to
// all three, and the witness leaves: then any one core may be lost. Each step may be repeated.

// growTimeout limits one try to change the streams.
const growTimeout = 30 * time.Second

// streamNames returns the streams that have copies.
func streamNames() []string {
	return []string{"MEMBERS", "INVITATIONS", "HOSTS", taskStream, queueStream, fileStream, entryStream}
}

// grow spreads the streams over the cores if there are enough of them. The core whose name comes first
// does it.
func (n *Node) grow(ctx context.Context) error {
	if n.core == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, growTimeout)
	defer cancel()
	if !n.core.Current() || n.spread {
		return nil
	}
	if !n.core.external() && n.cores() < copies {
		return nil
	}
	js, err := jetstream.New(n.nc)
	if err != nil {
		return err
	}
	spread := true
	for _, name := range streamNames() {
		ok, err := copied(ctx, js, name)
		if is, api := errors.AsType[*jetstream.APIError](err); api && n.core.external() && is.ErrorCode == alone {
			n.log.WarnContext(ctx, "the NATS server of cluster.url is not part of a NATS cluster: the streams have no copies")
			n.spread = true
			return nil
		}
		if err != nil {
			return err
		}
		spread = spread && ok
	}
	if !spread {
		return nil
	}
	n.spread = n.core.external() // with the others, it is looked at again: a stream may have lost a copy
	return n.retireWitness(ctx)
}

// alone is the error of a NATS server that does not belong to a NATS cluster: errors.json of the server.
const alone = jetstream.ErrorCode(server.JSStreamReplicasNotSupportedErr)

// cores returns how many hosts are cores.
func (n *Node) cores() (live int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, m := range n.members {
		if m.Removed.IsZero() && m.Role.Allows(CoreOf) {
			live++
		}
	}
	return live
}

// copied makes a stream have copies, and reports whether all of them are up to date.
func copied(ctx context.Context, js jetstream.JetStream, name string) (bool, error) {
	s, err := js.Stream(ctx, name)
	if err != nil {
		return false, fmt.Errorf("copy the cluster's stream %s: %w", name, err)
	}
	info := s.CachedInfo()
	if info.Config.Replicas < copies {
		c := info.Config
		c.Replicas = copies
		if _, err := js.UpdateStream(ctx, c); err != nil {
			return false, fmt.Errorf("copy the cluster's stream %s: %w", name, err)
		}
		return false, nil
	}
	if info.Cluster == nil || len(info.Cluster.Replicas) < copies-1 {
		return false, nil
	}
	for _, r := range info.Cluster.Replicas {
		if !r.Current || r.Offline {
			return false, nil
		}
	}
	return true, nil
}

// retireWitness ends this core's witness for good.
func (n *Node) retireWitness(ctx context.Context) error {
	if n.State.Witness == "" && !n.State.Retired {
		return nil
	}
	if !n.State.Retired {
		// First, because a server that was removed must never come back under its name.
		n.State.Witness, n.State.Retired = "", true
		if err := n.State.Save(n.dir); err != nil {
			return err
		}
	}
	if n.witness != nil {
		n.witness.Stop()
		n.witness = nil
	}
	if err := n.core.RemoveServer(ctx, witnessOf(n.State.Name)); err != nil {
		return err
	}
	n.State.Retired = false
	n.log.InfoContext(ctx, "the cluster has three cores; it survives the loss of one")
	return n.State.Save(n.dir)
}

// RemoveCore takes the vote of a core that was removed.
func (n *Node) RemoveCore(ctx context.Context, name string) error {
	if n.core == nil {
		return errors.New("only a core can remove another")
	}
	return n.core.RemoveServer(ctx, name)
}
