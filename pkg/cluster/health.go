package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go/jetstream"
)

// Health is the state of the cluster, as one host sees it.
type Health struct {
	Connected bool        // the host has a connection to a core
	Newest    uint64      // number of the latest entry in the log of tasks; 0 if it is unknown
	Core      *CoreHealth // of a core
}

// CoreHealth is the state of a core's server and of the streams.
type CoreHealth struct {
	External          bool   // another NATS cluster holds the streams; this server has no leader and no store then
	Current           bool   // the server knows all that the cluster has decided, or is connected to the other NATS cluster
	Leader            string // name of the server that leads the cluster; "" if it is unknown
	Store, StoreLimit int64  // of all streams on this server, in bytes
	Streams           []StreamHealth
}

// StreamHealth is the state of a stream, as its leader sees it.
type StreamHealth struct {
	Name         string
	Bytes, Limit int64 // Limit is 0 if the stream shares that of the server
	Copies       int   // that it should have
	Current      int   // copies that have all its records
}

// Health asks the cluster for its state. The error says which answers are missing.
func (n *Node) Health(ctx context.Context) (Health, error) {
	h := Health{Connected: n.nc.IsConnected()}
	names := []string{taskStream}
	if n.core != nil {
		core, err := n.core.health()
		if err != nil {
			return h, err
		}
		h.Core = &core
		names = streamNames()
	}
	js, err := jetstream.New(n.nc)
	if err != nil {
		return h, err
	}
	infos, errs := make([]*jetstream.StreamInfo, len(names)), make([]error, len(names))
	var asking sync.WaitGroup
	for i, name := range names {
		asking.Go(func() {
			s, err := js.Stream(ctx, name)
			if err != nil {
				errs[i] = fmt.Errorf("read the state of the cluster's stream %s: %w", name, err)
				return
			}
			infos[i] = s.CachedInfo()
		})
	}
	asking.Wait()
	for i, info := range infos {
		if info == nil {
			continue
		}
		if names[i] == taskStream {
			h.Newest = info.State.LastSeq
		}
		if h.Core != nil {
			h.Core.Streams = append(h.Core.Streams, streamHealth(info))
		}
	}
	return h, errors.Join(errs...)
}

func streamHealth(info *jetstream.StreamInfo) StreamHealth {
	s := StreamHealth{Name: info.Config.Name, Bytes: int64(info.State.Bytes), Limit: max(0, info.Config.MaxBytes), Copies: info.Config.Replicas, Current: 1} // its leader answers
	if info.Cluster == nil {
		return s
	}
	for _, r := range info.Cluster.Replicas {
		if r.Current && !r.Offline {
			s.Current++
		}
	}
	return s
}

// health returns the state of the server, without asking others.
func (c *Core) health() (CoreHealth, error) {
	h := CoreHealth{External: c.external(), Current: c.Current()}
	if h.External {
		return h, nil
	}
	is, err := c.server.Load().Jsz(nil)
	if err != nil {
		return h, fmt.Errorf("read the state of the cluster's server: %w", err)
	}
	h.Store, h.StoreLimit = int64(is.Store), is.Config.MaxStore
	if is.Meta != nil {
		h.Leader = is.Meta.Leader
	}
	return h, nil
}
