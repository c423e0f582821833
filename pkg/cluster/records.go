package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
)

// maxRecord limits a record, in bytes. A chunk of events is smaller, because an event has at most
// 64 KiB.
const maxRecord = 512 << 10

// format is the version of message.
const format = 1

// message is a record as it is stored.
type message struct {
	Format int             `json:"format"` // of this program; a host refuses records of a later one
	ID     string          `json:"id"`     // random, to recognize a record whose acknowledgement was lost
	Host   string          `json:"host"`   // the writer
	Body   json.RawMessage `json:"body"`
}

// record is a stored message and its position.
type record struct {
	message
	Key string    // the id whose record it is
	Seq uint64    // grows with each record of the stream, with gaps for one subject
	At  time.Time // when it was stored, on the clock of a core
	Err error     // ErrDamaged, wrapped, of one that follow yields
}

// records are a JetStream stream in which every subject is written by compare-and-set: a record is
// added with the header Nats-Expected-Last-Subject-Sequence, so of several hosts that continue from
// the same record, one succeeds. Source: https://docs.nats.io/nats-concepts/jetstream/headers.
type records struct {
	js     jetstream.JetStream
	stream jetstream.Stream
	name   string
	prefix string // of its subjects; the rest is an id
	host   string // who writes here
	alien  bool   // yield also what has another subject, as damaged
}

// openRecords opens a stream, and creates it if it does not exist. c has what distinguishes it
// from others.
func openRecords(ctx context.Context, js jetstream.JetStream, host, prefix string, c jetstream.StreamConfig) (records, error) {
	c.Subjects, c.Storage, c.MaxMsgSize = []string{prefix + "*"}, jetstream.FileStorage, maxRecord
	c = placed(c, c.Replicas)
	c.Discard = jetstream.DiscardNew // a full stream must not lose its oldest records
	stream, err := js.Stream(ctx, c.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		stream, err = js.CreateStream(ctx, c)
	}
	if err != nil {
		return records{}, fmt.Errorf("open the cluster's stream %s: %w", c.Name, err)
	}
	return records{js: js, stream: stream, name: c.Name, prefix: prefix, host: host}, nil
}

// These limit one try to append a record, and the pause before the next.
const (
	tryTimeout = 2 * time.Second
	tryPause   = 50 * time.Millisecond
)

// append adds a record for id if the latest one has the sequence number after, which is 0 if there
// is none. It returns the number of the new record, or ErrConflict, wrapped, if another
// record was added first. After any other error it is unknown whether the record was added.
//
// If no acknowledgement arrives, append sends the record again until ctx ends. It recognizes its
// own record, so it adds it only once.
func (r records) append(ctx context.Context, id string, body any, after uint64) (uint64, error) {
	m := message{Format: format, ID: ids.New(), Host: r.host}
	var err error
	if m.Body, err = json.Marshal(body); err != nil {
		return 0, err
	}
	text, err := json.Marshal(m)
	if err != nil {
		return 0, err
	}
	if len(text) > maxRecord {
		return 0, fail.New(fail.Usage, "the record of %s%s has %d bytes, over the limit of %d", r.prefix, id, len(text), maxRecord)
	}
	var last error
	for {
		seq, err := r.try(ctx, id, m.ID, text, after)
		if err == nil || errors.Is(err, ErrConflict) {
			return seq, err
		}
		if isFull(err) {
			return 0, fail.New(fail.Host, "write %s%s: the stream %s is full, or the disk of a core: %w: %w", r.prefix, id, r.name, ErrFull, err).
				WithHint("agent-sessionizer cluster list")
		}
		if refused(err) {
			return 0, fmt.Errorf("write %s%s to the cluster: %w", r.prefix, id, err)
		}
		if ctx.Err() == nil || last == nil { // otherwise ctx cut this try short, and the one before it says more
			last = err
		}
		select {
		case <-time.After(tryPause):
		case <-ctx.Done():
			return 0, fmt.Errorf("write %s%s to the cluster: %w (%w)", r.prefix, id, context.Cause(ctx), last)
		}
	}
}

// try sends a record once. An error other than ErrConflict means that it may be sent again.
func (r records) try(ctx context.Context, id, unique string, text []byte, after uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	ack, err := r.js.PublishMsg(ctx, &nats.Msg{Subject: r.prefix + id, Data: text},
		jetstream.WithExpectLastSequencePerSubject(after), jetstream.WithExpectStream(r.name))
	if err == nil {
		return ack.Sequence, nil
	}
	if !isConflict(err) {
		return 0, err
	}
	// The other record may be this one, from an earlier try. It may also be one that is not stored
	// in the end, so only a stored one decides.
	next, rerr := r.from(ctx, id, after+1)
	switch {
	case errors.Is(rerr, ErrNone) && r.lacks(ctx, id, after):
		return 0, fail.New(fail.Conflict, "the cluster has lost record %d of %s%s: its streams may have been restored from a backup", after, r.prefix, id).
			WithHint("agent-sessionizer cluster leave --force # on every host; then found a new cluster")
	case rerr != nil:
		return 0, errors.Join(err, rerr)
	case next.ID == unique:
		return next.Seq, nil
	}
	return 0, fmt.Errorf("write %s%s to the cluster: host %s: %w", r.prefix, id, next.Host, ErrConflict)
}

// lacks reports whether the latest record of id is earlier than one that was acknowledged. A server that just
// lost touch with the others may lack it for a moment.
func (r records) lacks(ctx context.Context, id string, acknowledged uint64) bool {
	last, err := r.last(ctx, id)
	return (err == nil || errors.Is(err, ErrNone)) && last.Seq < acknowledged
}

// isConflict reports whether the stream has, or is about to have, another last record.
func isConflict(err error) bool {
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == wrongLastSequenceConstant)
}

// wrongLastSequenceConstant is the server's error code for a conflict with a record that is not
// stored yet (JSStreamWrongLastSequenceConstantErr in the server's errors.json).
const wrongLastSequenceConstant jetstream.ErrorCode = 10164

// refused reports whether the server answered that it does not store the record, and will not store
// it later either.
func refused(err error) bool {
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && !isConflict(err) && api.Code != 503 // 503: no leader, for now
}

// from returns the first record of id from a sequence number on, or ErrNone, wrapped.
func (r records) from(ctx context.Context, id string, seq uint64) (record, error) {
	raw, err := r.stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(r.prefix+id))
	return r.read(id, raw, err)
}

// last returns the latest record of id, or ErrNone, wrapped. A server that just lost touch with the
// others may return an older one: only append decides.
func (r records) last(ctx context.Context, id string) (record, error) {
	raw, err := r.stream.GetLastMsgForSubject(ctx, r.prefix+id)
	return r.read(id, raw, err)
}

func (r records) read(id string, raw *jetstream.RawStreamMsg, err error) (record, error) {
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		err = ErrNone
	}
	if err != nil {
		return record{}, fmt.Errorf("read %s%s of the cluster: %w", r.prefix, id, err)
	}
	return r.parse(id, raw.Sequence, raw.Time, raw.Data)
}

// parse reads a stored record, which another host may have written. If it is damaged, the error is
// ErrDamaged, wrapped, and the result has the record's position.
func (r records) parse(id string, seq uint64, at time.Time, text []byte) (record, error) {
	is := record{Key: id, Seq: seq, At: at}
	if err := json.Unmarshal(text, &is.message); err != nil {
		return is, fmt.Errorf("read %s%s of the cluster: record %d: %w: %w", r.prefix, id, seq, ErrDamaged, err)
	}
	if is.Format > format {
		return is, fail.New(fail.Host, "read %s%s of the cluster: host %s wrote format %d, and this program knows %d: %w", r.prefix, id, is.Host, is.Format, format, ErrDamaged).
			WithHint("agent-sessionizer cluster list # shows the versions")
	}
	return is, nil
}

// body decodes what a record holds.
func body[T any](r record, err error) (is T, _ error) {
	if err != nil {
		return is, err
	}
	if err := json.Unmarshal(r.Body, &is); err != nil {
		return is, fmt.Errorf("read record %d of the cluster, by host %s: %w: %w", r.Seq, r.Host, ErrDamaged, err)
	}
	return is, nil
}

// eachExpiry is how long the server keeps a request for more records.
const eachExpiry = 2 * time.Second

// eachInactive is how long the server keeps a consumer whose host has ended.
const eachInactive = time.Minute

// each yields the latest record of every id, up to now. An error is the last item, unless it is
// ErrDamaged, wrapped: it is about that record.
func (r records) each(ctx context.Context) iter.Seq2[record, error] {
	return r.upToNow(ctx, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy})
}

// all yields all records after a sequence number, up to now, like each.
func (r records) all(ctx context.Context, after uint64) iter.Seq2[record, error] {
	return r.upToNow(ctx, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: after + 1})
}

func (r records) upToNow(ctx context.Context, o jetstream.OrderedConsumerConfig) iter.Seq2[record, error] {
	return func(yield func(record, error) bool) {
		o.InactiveThreshold = eachInactive
		c, err := r.stream.OrderedConsumer(ctx, o)
		if err != nil {
			yield(record{}, fmt.Errorf("read the cluster's stream %s: %w", r.name, err))
			return
		}
		defer r.forget(ctx, c)
		left := c.CachedInfo().NumPending
		if left == 0 {
			return
		}
		// The heartbeats show that the server lost the request, as it may if the consumer is new.
		all, err := c.Messages(jetstream.PullExpiry(eachExpiry), jetstream.PullHeartbeat(eachExpiry/4))
		if err != nil {
			yield(record{}, fmt.Errorf("read the cluster's stream %s: %w", r.name, err))
			return
		}
		defer all.Stop()
		for left > 0 {
			m, err := all.Next(jetstream.NextContext(ctx))
			var is record
			if err == nil {
				var meta *jetstream.MsgMetadata
				if meta, err = m.Metadata(); err == nil {
					left = meta.NumPending
					id, own := strings.CutPrefix(m.Subject(), r.prefix)
					switch {
					case own:
						is, err = r.parse(id, meta.Sequence.Stream, meta.Timestamp, m.Data())
					case r.alien:
						is, err = record{Seq: meta.Sequence.Stream, At: meta.Timestamp}, ErrDamaged
					default:
						continue // an answer of the server that a host redirected into the stream
					}
				}
			}
			if err != nil {
				err = fmt.Errorf("read the cluster's stream %s: %w", r.name, err)
			}
			if !yield(is, err) || err != nil && !errors.Is(err, ErrDamaged) {
				return
			}
		}
	}
}

// forget removes a consumer. Otherwise the server keeps it for a while.
func (r records) forget(ctx context.Context, c jetstream.Consumer) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tryTimeout) // also after the end of the caller
	defer cancel()
	_ = r.stream.DeleteConsumer(ctx, c.CachedInfo().Name) // the server does it later
}

// newest returns the sequence number of the stream's latest record.
func (r records) newest(ctx context.Context) (uint64, error) {
	info, err := r.stream.Info(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the state of the cluster's stream %s: %w", r.name, err)
	}
	return info.State.LastSeq, nil
}

// Limits of what follow yields at once.
const (
	followMost   = 256
	followExpiry = 30 * time.Second
)

// follow yields all records after a sequence number, several at a time, and then waits for new ones
// until ctx ends. An error is the last item.
func (r records) follow(ctx context.Context, after uint64) iter.Seq2[[]record, error] {
	return func(yield func([]record, error) bool) {
		fail := func(err error) { yield(nil, fmt.Errorf("follow the cluster's stream %s: %w", r.name, err)) }
		c, err := r.stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: after + 1, InactiveThreshold: eachInactive})
		if err != nil {
			fail(err)
			return
		}
		defer r.forget(ctx, c)
		all, err := c.Messages(jetstream.PullExpiry(followExpiry), jetstream.PullHeartbeat(followExpiry/6))
		if err != nil {
			fail(err)
			return
		}
		defer all.Stop()
		var batch []record
		for {
			m, err := all.Next(jetstream.NextContext(ctx))
			if err != nil {
				fail(err)
				return
			}
			meta, err := m.Metadata()
			if err != nil {
				fail(err)
				return
			}
			if id, own := strings.CutPrefix(m.Subject(), r.prefix); own { // otherwise, an answer of the server that a host redirected into the stream
				is, err := r.parse(id, meta.Sequence.Stream, meta.Timestamp, m.Data())
				if is.Err = err; err != nil && !errors.Is(err, ErrDamaged) {
					fail(err)
					return
				}
				batch = append(batch, is)
			}
			if len(batch) == 0 || meta.NumPending > 0 && len(batch) < followMost {
				continue
			}
			if !yield(batch, nil) {
				return
			}
			batch = nil
		}
	}
}

// tidyMost limits what one call of tidy removes.
const tidyMost = 5000

// tidy removes records that are not to be kept from a stream that is at least half full: every host can
// redirect answers of the server into every stream. An
// error that keep receives is ErrDamaged, wrapped. It is for cores.
func (r records) tidy(ctx context.Context, keep func(record, error) bool) error {
	info, err := r.stream.Info(ctx)
	if err != nil || info.Config.MaxBytes <= 0 || int64(info.State.Bytes) < info.Config.MaxBytes/2 {
		return err
	}
	r.alien = true
	var drop []uint64
	for is, err := range r.all(ctx, 0) {
		if err != nil && !errors.Is(err, ErrDamaged) {
			return err
		}
		if later := is.Format > format && is.Key != ""; !later && len(drop) < tidyMost && !keep(is, err) {
			drop = append(drop, is.Seq)
		}
	}
	for _, seq := range drop {
		if err := r.stream.DeleteMsg(ctx, seq); err != nil && !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) { // another core was first
			return fmt.Errorf("tidy the cluster's stream %s: %w", r.name, err)
		}
	}
	return nil
}
