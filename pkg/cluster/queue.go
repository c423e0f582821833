package cluster

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Need is what a task requires of its host.
type Need struct {
	Arch   string            `json:"arch,omitempty"`
	Accel  string            `json:"accel,omitempty"`
	Memory int64             `json:"memory,omitempty"` // bytes
	Labels map[string]string `json:"labels,omitempty"`
}

// memoryStep is the step to which the memory of needs is rounded up, in bytes. Each need that differs
// is a queue.
const memoryStep = 4 << 30

func (n Need) rounded() Need {
	n.Memory = (n.Memory + memoryStep - 1) / memoryStep * memoryStep
	return n
}

// Meets reports whether the host can take a task with that need now.
func (h Host) Meets(n Need) bool {
	if h.Drained || h.Revoked != "" || h.FreeSlots < 1 || n.Arch != "" && n.Arch != h.Arch || n.Accel != "" && n.Accel != h.Accel ||
		n.Memory > h.FreeMemory {
		return false
	}
	for key, value := range n.Labels {
		if has, ok := h.Labels[key]; !ok || has != value {
			return false
		}
	}
	return true
}

// Band is a range of priorities. Order between hosts is kept only between bands.
type Band string

// The bands, the most urgent first.
const (
	High   Band = "high"
	Normal Band = "normal"
	Low    Band = "low"
)

// BandOf returns the band of a manifest's priority.
func BandOf(priority int) Band {
	switch cmp.Compare(priority, 0) {
	case 1:
		return High
	case -1:
		return Low
	}
	return Normal
}

var bands = []Band{High, Normal, Low}

// Queue holds the tasks that wait for any host. It is a JetStream stream with the retention of a work
// queue and one consumer for each need and band, so JetStream gives each task to one host
// that asks for it. An offer may arrive twice: the task's log decides.
type Queue struct {
	stream jetstream.Stream
	js     jetstream.JetStream

	mu     sync.Mutex
	known  map[string]bool      // names of consumers
	early  map[string]time.Time // by task: when this host first saw an offer without an entry
	listed []openLine           // all lines, the most urgent first
	at     time.Time            // of the list
}

// openLine is a line as the server has it.
type openLine struct {
	need     Need
	band     Band
	consumer jetstream.Consumer
}

const (
	queueStream = "QUEUE"
	// ackWait is how long a host may take to claim an offer before another one gets it.
	ackWait = 30 * time.Second
	needKey = "need" // of a consumer's metadata
	bandKey = "band"
	// listFor is how long a host uses a list of the lines: the server asks all consumers for each.
	listFor  = 5 * time.Second
	maxQueue = 64 << 20 // of all offers, in bytes
	maxOffer = 1 << 10
	// offerFor is how long an offer waits. A task that still waits is then offered again.
	offerFor = 24 * time.Hour
	// maxWaiting is how many hosts may wait for the offers of one line.
	maxWaiting = 1 << 16
)

// OpenQueue opens the queue, and creates it on that many cores if it does not exist.
func OpenQueue(ctx context.Context, js jetstream.JetStream, replicas int) (*Queue, error) {
	stream, err := js.Stream(ctx, queueStream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		stream, err = js.CreateStream(ctx, placed(jetstream.StreamConfig{
			Name: queueStream, Subjects: []string{"queue.*.*"}, Storage: jetstream.FileStorage, Retention: jetstream.WorkQueuePolicy,
			MaxBytes: maxQueue, MaxMsgSize: maxOffer, MaxAge: offerFor, Discard: jetstream.DiscardNew,
		}, replicas))
	}
	if err != nil {
		return nil, fmt.Errorf("open the cluster's queue: %w", err)
	}
	return &Queue{js: js, stream: stream, known: map[string]bool{}, early: map[string]time.Time{}}, nil
}

// Line is a part of the queue: the offers of one need and band.
type Line struct {
	need []byte // as JSON
	band Band
}

// NewLine returns where tasks with that need and band wait.
func NewLine(n Need, b Band) Line {
	text, _ := json.Marshal(n.rounded()) // strings and numbers only; maps are sorted
	return Line{text, b}
}

// name returns the name of the line's consumer.
func (l Line) name() string { return l.class() + "-" + string(l.band) }

func (l Line) class() string {
	sum := sha256.Sum256(l.need)
	return hex.EncodeToString(sum[:8])
}

// Subject returns the subject of the line's offers.
func (l Line) Subject() string { return "queue." + l.class() + "." + string(l.band) }

// Offer puts a task into the queue. It is for a host that finds an entry of the task's log after the
// sequence number after: the caller offers a task before it writes the entry that lets it be
// claimed, so that no task that was accepted can lack its offer.
func (q *Queue) Offer(ctx context.Context, task string, after uint64, l Line) error {
	q.mu.Lock()
	known := q.known[l.name()]
	q.mu.Unlock()
	if !known {
		if err := q.Open(ctx, l); err != nil {
			return err
		}
		q.mu.Lock()
		q.known[l.name()] = true
		q.mu.Unlock()
	}
	body, err := json.Marshal(Offer{Task: task, After: after})
	if err != nil {
		return err
	}
	if _, err := q.js.Publish(ctx, l.Subject(), body, jetstream.WithExpectStream(queueStream)); err != nil {
		if isFull(err) {
			err = fail.New(fail.Host, "the cluster's queue is full, or the disk of a core: %w: %w", ErrFull, err).WithHint("agent-sessionizer cluster list")
		}
		return fmt.Errorf("queue task %s: %w", task, err)
	}
	return nil
}

// tidy removes offers of lines that are not open, which no host sees, if the queue is at least half full. Tasks
// that wait there are offered again.
func (q *Queue) tidy(ctx context.Context) error {
	info, err := q.stream.Info(ctx, jetstream.WithSubjectFilter(">"))
	if err != nil || info.Config.MaxBytes <= 0 || int64(info.State.Bytes) < info.Config.MaxBytes/2 {
		return err
	}
	open, err := q.Offers(ctx)
	for subject := range info.State.Subjects {
		if _, is := open[subject]; err == nil && !is {
			err = q.stream.Purge(ctx, jetstream.WithPurgeSubject(subject))
		}
	}
	return err
}

// Open makes hosts see the offers of a line. The server forgets lines that no host asked for in a day.
func (q *Queue) Open(ctx context.Context, l Line) error {
	if _, err := q.stream.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
		Durable: l.name(), FilterSubject: l.Subject(), AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxAckPending: -1, MaxWaiting: maxWaiting,
		InactiveThreshold: 24 * time.Hour,
		Metadata:          map[string]string{needKey: string(l.need), bandKey: string(l.band)},
	}); err != nil {
		return fmt.Errorf("open the cluster's queue %s: %w", l.name(), err)
	}
	return nil
}

// Offers returns how many offers each subject has that no host has removed with Done. Those of lines
// that are not open do not count: no host sees them.
func (q *Queue) Offers(ctx context.Context) (map[string]uint64, error) {
	info, err := q.stream.Info(ctx, jetstream.WithSubjectFilter("queue.>"))
	if err != nil {
		return nil, fmt.Errorf("count the offers in the cluster's queue: %w", err)
	}
	offers := map[string]uint64{}
	all := q.stream.ListConsumers(ctx)
	for c := range all.Info() {
		offers[c.Config.FilterSubject] = info.State.Subjects[c.Config.FilterSubject]
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("list the cluster's queues: %w", err)
	}
	return offers, nil
}

// Offer is a task that a host may claim, once its log has an entry after After.
type Offer struct {
	Task  string `json:"task"`
	After uint64 `json:"after"`

	msg jetstream.Msg
	q   *Queue
}

func (q *Queue) offer(m jetstream.Msg) Offer {
	o := Offer{msg: m, q: q}
	_ = json.Unmarshal(m.Data(), &o) // without a task, nothing can be claimed
	return o
}

// Done removes the offer: the task has a host.
func (o Offer) Done(ctx context.Context) error { return o.msg.DoubleAck(ctx) }

// Return gives the offer to another host.
func (o Offer) Return() error { return o.msg.Nak() }

// Later gives the offer to another host after a moment: this one must tidy up first.
func (o Offer) Later() error { return o.msg.NakWithDelay(earlyPause) }

// Times after which an offer whose task has no entry yet is made again, at first and at most, and after
// which a host that has seen it removes it: who made the offer has ended.
const (
	earlyFirst = 20 * time.Millisecond // the entry follows the offer
	earlyPause = time.Second
	earlyFor   = 2 * time.Minute
)

// Early returns an offer whose task's log has no entry after After yet.
func (o Offer) Early(ctx context.Context) error {
	if o.q.waited(o.Task) < earlyFor {
		meta, err := o.msg.Metadata()
		if err != nil {
			return err
		}
		return o.msg.NakWithDelay(min(earlyPause, earlyFirst<<min(meta.NumDelivered-1, 10)))
	}
	if err := o.Done(ctx); err != nil {
		return err
	}
	o.q.mu.Lock()
	defer o.q.mu.Unlock()
	delete(o.q.early, o.Task)
	return nil
}

// waited returns how long ago this host first saw an offer of a task too early.
func (q *Queue) waited(task string) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	for id, first := range q.early { // of tasks whose entry came, or that another host has seen to the end
		if time.Since(first) > 2*earlyFor {
			delete(q.early, id)
		}
	}
	if _, ok := q.early[task]; !ok {
		q.early[task] = time.Now()
	}
	return time.Since(q.early[task])
}

// lines returns the consumers whose tasks the host can take, the most urgent first.
func (q *Queue) lines(ctx context.Context, h Host) (lines []jetstream.Consumer, err error) {
	q.mu.Lock()
	all, old := q.listed, len(q.listed) == 0 || time.Since(q.at) > listFor
	q.mu.Unlock()
	if old {
		if all, err = q.list(ctx, all); err != nil {
			return nil, err
		}
		q.mu.Lock()
		q.listed, q.at = all, time.Now()
		q.mu.Unlock()
	}
	for _, l := range all {
		if h.Meets(l.need) {
			lines = append(lines, l.consumer)
		}
	}
	return lines, nil
}

// list asks the server for all lines. It opens those that are not among the earlier ones.
func (q *Queue) list(ctx context.Context, was []openLine) (list []openLine, err error) {
	open := map[string]jetstream.Consumer{}
	for _, l := range was {
		open[l.consumer.CachedInfo().Name] = l.consumer
	}
	all := q.stream.ListConsumers(ctx)
	for c := range all.Info() {
		l := openLine{band: Band(c.Config.Metadata[bandKey]), consumer: open[c.Name]}
		if !slices.Contains(bands, l.band) || json.Unmarshal([]byte(c.Config.Metadata[needKey]), &l.need) != nil {
			continue
		}
		if l.consumer == nil {
			if l.consumer, err = q.stream.Consumer(ctx, c.Name); err != nil {
				return nil, fmt.Errorf("open the cluster's queue %s: %w", c.Name, err)
			}
		}
		list = append(list, l)
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("list the cluster's queues: %w", err)
	}
	slices.SortFunc(list, func(a, b openLine) int {
		return cmp.Or(cmp.Compare(slices.Index(bands, a.band), slices.Index(bands, b.band)), strings.Compare(a.consumer.CachedInfo().Name, b.consumer.CachedInfo().Name))
	})
	return list, nil
}

// Take waits up to wait for an offer that the host meets. It returns false if there was none.
func (q *Queue) Take(ctx context.Context, h Host, wait time.Duration) (Offer, bool, error) {
	lines, err := q.lines(ctx, h)
	if err != nil {
		return Offer{}, false, err
	}
	for _, c := range lines {
		batch, err := c.FetchNoWait(1)
		if err != nil {
			return Offer{}, false, fmt.Errorf("read the cluster's queue: %w", err)
		}
		for m := range batch.Messages() {
			return q.offer(m), true, nil
		}
	}
	// Now whichever is first, from any of them. The others are not given up, because an offer that the
	// server has sent here would wait for ackWait.
	began := time.Now()
	end := time.NewTimer(wait)
	defer end.Stop()
	offers, over := make(chan Offer), make(chan struct{})
	defer close(over)
	var asking sync.WaitGroup
	for _, c := range lines {
		asking.Go(func() {
			batch, err := c.Fetch(1, jetstream.FetchMaxWait(wait))
			if err != nil {
				return
			}
			for m := range batch.Messages() {
				o := q.offer(m)
				select {
				case offers <- o:
				case <-over:
					_ = o.Return()
				}
			}
		})
	}
	var o Offer
	ok := false
	if len(lines) > 0 { // otherwise, a need that this host meets may appear
		go func() { asking.Wait(); close(offers) }()
		select {
		case o, ok = <-offers:
		case <-ctx.Done():
		}
	}
	if !ok && time.Since(began) < wait/2 { // the server refused: the line has ended, or there is no leader
		q.mu.Lock()
		q.at = time.Time{}
		q.mu.Unlock()
		select {
		case <-end.C:
		case <-ctx.Done():
		}
	}
	return o, ok, nil
}
