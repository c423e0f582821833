package fleet

import (
	"context"
	"iter"
	"maps"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// hostLabel is the label that each host has with its own name.
const hostLabel = "host"

// line returns where a task waits in the queue: by what it requires of its host, and by its priority.
func line(row store.Task) (cluster.Line, error) {
	t, err := task.Decode(row)
	if err != nil {
		return cluster.Line{}, err
	}
	p := t.Manifest.Placement
	labels := maps.Clone(p.Labels)
	if p.Host != "" {
		if labels == nil {
			labels = map[string]string{}
		}
		labels[hostLabel] = p.Host
	}
	return cluster.NewLine(cluster.Need{
		Arch: p.Arch, Labels: labels, Memory: int64(t.Manifest.VM.Memory) / 2, // as a host alone admits VMs
	}, cluster.BandOf(row.Priority)), nil
}

// offer puts a task into the queue, for a host that finds an entry of its log after a sequence number.
func (f *Tasks) offer(ctx context.Context, row store.Task, after uint64) error {
	l, err := line(row)
	if err != nil {
		return err
	}
	return f.Queue.Offer(ctx, row.ID, after, l)
}

// waitingAtOnce is how many waiting tasks are read at once.
const waitingAtOnce = 500

// waiting yields the tasks that no host has, as this host's replicas have them, the oldest first. An
// error is the last item.
func (f *Tasks) waiting(ctx context.Context) iter.Seq2[store.Task, error] {
	return func(yield func(store.Task, error) bool) {
		filter := store.TaskFilter{Phases: []string{string(task.Pending)}, OldestFirst: true, Limit: waitingAtOnce}
		for {
			rows, err := f.Store.Tasks(ctx, filter)
			if err != nil {
				yield(store.Task{}, err)
			}
			if err != nil || len(rows) == 0 {
				return
			}
			for _, row := range rows {
				if row.Host == store.Waiting && !yield(row, nil) {
					return
				}
			}
			filter.After = rows[len(rows)-1].ID
		}
	}
}

// missing returns how many offers each line of the queue lacks, by its subject: more tasks wait there than it
// has offers, as far as this host knows.
func (f *Tasks) missing(ctx context.Context) (map[string]int, error) {
	missing := map[string]int{}
	for row, err := range f.waiting(ctx) {
		if err != nil {
			return nil, err
		}
		l, err := line(row)
		if err != nil {
			return nil, err
		}
		missing[l.Subject()]++
	}
	if len(missing) == 0 {
		return nil, nil
	}
	offers, err := f.Queue.Offers(ctx)
	maps.DeleteFunc(missing, func(subject string, waiting int) bool {
		missing[subject] = waiting - int(offers[subject])
		return missing[subject] <= 0
	})
	return missing, err
}

// Reoffer offers tasks again if more of them wait than the queue has offers, and returns how many.
// A host may end between its look at an offer and what it does with it, and a core may lose
// what its disk had not stored. The oldest tasks are offered, as those offers should have been taken
// first; an offer too many does no harm.
func (f *Tasks) Reoffer(ctx context.Context) (n int, err error) {
	missing, err := f.missing(ctx)
	if err != nil || len(missing) == 0 {
		return 0, err
	}
	opened := map[string]bool{}
	for row, err := range f.waiting(ctx) {
		if err != nil {
			return n, err
		}
		l, err := line(row)
		if err != nil {
			return n, err
		}
		if missing[l.Subject()] <= 0 {
			continue
		}
		if !opened[l.Subject()] { // the server may have forgotten it since this host opened it
			if err := f.Queue.Open(ctx, l); err != nil {
				return n, err
			}
			opened[l.Subject()] = true
		}
		if err := f.Queue.Offer(ctx, row.ID, 0, l); err != nil {
			return n, err
		}
		missing[l.Subject()]--
		n++
	}
	return n, nil
}
