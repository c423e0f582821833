package cluster

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// partSize is the size of all parts of a file but the last, in bytes. After an interruption, parts
// that are stored are not sent again.
const partSize = 512 << 10

const (
	fileStream  = "ARTIFACTS"
	entryStream = "ENTRIES"
)

// ErrFull is returned, wrapped, if a stream of the cluster has no room.
var ErrFull = errors.New("the cluster has no room for it")

// Part is a piece of a file.
type Part struct {
	SHA256 string `json:"sha256"`         // hex
	Size   int64  `json:"size"`           // bytes
	Name   string `json:"name,omitempty"` // ends its subject; "" means SHA256
}

// Files are a store of files for tasks, in a stream. Each part is a message with the subject
// KIND.TASK.NAME. The server stores the first one of a subject and refuses others, and nothing can be
// deleted: JetStream's object store would let each host that writes to it empty it.
type Files struct {
	js     jetstream.JetStream
	stream jetstream.Stream
	name   string // of the stream
	kind   string // begins its subjects
	secret []byte // of this host, from which the names of its parts derive; nil means their digests
}

// OpenFiles opens the store of artifacts and logs, and creates it on that many cores if it does not
// exist. Files disappear after keep. The names of the parts that this host stores derive from its keys:
// otherwise, another host that knows the digest of an artifact could store something else there before.
func OpenFiles(ctx context.Context, js jetstream.JetStream, k *Keys, replicas int, size int64, keep time.Duration) (*Files, error) {
	f, err := openFiles(ctx, js, "artifact.", jetstream.StreamConfig{Name: fileStream, Replicas: replicas, MaxBytes: size, MaxAge: keep})
	if err == nil {
		f.secret, err = k.derive("names of files")
	}
	return f, err
}

// OpenEntries opens the store of what is too large for an entry of the log of tasks, and creates it on
// that many cores if it does not exist.
func OpenEntries(ctx context.Context, js jetstream.JetStream, replicas int, size int64) (*Files, error) {
	return openFiles(ctx, js, "entry.", jetstream.StreamConfig{Name: entryStream, Replicas: replicas, MaxBytes: size})
}

func openFiles(ctx context.Context, js jetstream.JetStream, kind string, c jetstream.StreamConfig) (*Files, error) {
	s, err := js.Stream(ctx, c.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		c.Subjects, c.Storage, c.MaxMsgSize = []string{kind + "*.*"}, jetstream.FileStorage, partSize+4<<10 // with headers
		c.MaxMsgsPerSubject, c.Discard, c.DiscardNewPerSubject, c.DenyDelete, c.DenyPurge = 1, jetstream.DiscardNew, true, true, true
		s, err = js.CreateStream(ctx, placed(c, c.Replicas))
	}
	if err != nil {
		return nil, fmt.Errorf("open the cluster's stream %s: %w", c.Name, err)
	}
	return &Files{js: js, stream: s, name: c.Name, kind: kind}, nil
}

func (f *Files) subject(task string, p Part) string {
	return f.kind + task + "." + cmp.Or(p.Name, p.SHA256)
}

// part describes a part that this host stores.
func (f *Files) part(task string, data []byte) Part {
	sum := sha256.Sum256(data)
	p := Part{SHA256: hex.EncodeToString(sum[:]), Size: int64(len(data))}
	if f.secret != nil {
		h := hmac.New(sha256.New, f.secret)
		h.Write([]byte(task + "." + p.SHA256))
		p.Name = hex.EncodeToString(h.Sum(nil))
	}
	return p
}

// Put stores a file of a task and returns its parts, which Open needs. If it is interrupted, the
// next Put sends only what is missing. The error is ErrFull, wrapped, if there is no room.
func (f *Files) Put(ctx context.Context, task string, r io.Reader) ([]Part, error) {
	stored, err := f.stored(ctx, f.kind+task+".*")
	if err != nil {
		return nil, err
	}
	var parts []Part
	buf := make([]byte, partSize)
	for {
		n, err := io.ReadFull(r, buf)
		if errors.Is(err, io.EOF) {
			return parts, nil
		}
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			return parts, err
		}
		p := f.part(task, buf[:n])
		if !stored[f.subject(task, p)] {
			if err := f.put(ctx, task, p, buf[:n]); err != nil {
				return parts, fmt.Errorf("store part %d of a file of task %s in the cluster: %w", len(parts)+1, task, err)
			}
		}
		parts = append(parts, p)
		if n < partSize {
			return parts, nil
		}
	}
}

// put stores one part, unless it is stored.
func (f *Files) put(ctx context.Context, task string, p Part, data []byte) error {
	_, err := f.js.Publish(ctx, f.subject(task, p), data, jetstream.WithExpectStream(f.name))
	if !isFull(err) {
		return err
	}
	// Which limit refuses it is known only as text: there is no room, or this part exists.
	stored, serr := f.stored(ctx, f.subject(task, p))
	switch {
	case serr != nil:
		return serr
	case stored[f.subject(task, p)]:
		return nil
	}
	return fmt.Errorf("%w: %w", ErrFull, err)
}

// The server's error codes for a message that a limit of the stream refuses, and for one that a limit of
// all streams refuses (JSStreamStoreFailedF and JSStorageResourcesExceededErr in the server's
// errors.json).
const (
	storeFailed     jetstream.ErrorCode = 10077
	storageExceeded jetstream.ErrorCode = 10047
)

// isFull reports whether a limit refuses a message.
func isFull(err error) bool {
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && (api.ErrorCode == storeFailed || api.ErrorCode == storageExceeded)
}

// stored returns which of the subjects that match a filter are stored.
func (f *Files) stored(ctx context.Context, filter string) (map[string]bool, error) {
	info, err := f.stream.Info(ctx, jetstream.WithSubjectFilter(filter))
	if err != nil {
		return nil, fmt.Errorf("look for files in the cluster: %w", err)
	}
	stored := map[string]bool{}
	for subject := range info.State.Subjects {
		stored[subject] = true
	}
	return stored, nil
}

// Open returns a file of a task. Reading it returns only bytes that have the digest of their part, and
// fails if one was removed or is damaged. ctx limits all reading.
func (f *Files) Open(ctx context.Context, task string, parts []Part) (*io.SectionReader, error) {
	size := int64(0)
	for i, p := range parts {
		if p.Size < 0 || p.Size > partSize || p.Size < partSize && i < len(parts)-1 {
			return nil, fail.New(fail.Failure, "read a file of task %s: part %d has an invalid size", task, i+1)
		}
		size += p.Size
	}
	return io.NewSectionReader(&fileReader{f: f, ctx: ctx, task: task, parts: parts}, 0, size), nil
}

// fileReader reads the parts of a file. It keeps the latest.
type fileReader struct {
	f     *Files
	ctx   context.Context //nolint:containedctx // an io.ReaderAt has no other way
	task  string
	parts []Part

	mu   sync.Mutex
	at   int // of data among the parts
	data []byte
}

// ReadAt implements io.ReaderAt.
func (r *fileReader) ReadAt(b []byte, off int64) (n int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n < len(b) {
		i, within := int(off/partSize), off%partSize
		if i >= len(r.parts) || within >= r.parts[i].Size {
			return n, io.EOF
		}
		if r.data == nil || r.parts[r.at] != r.parts[i] {
			if r.data, err = r.f.get(r.ctx, r.task, r.parts[i]); err != nil {
				return n, fmt.Errorf("read part %d of %d of a file of task %s: %w", i+1, len(r.parts), r.task, err)
			}
		}
		r.at = i
		c := copy(b[n:], r.data[within:])
		n, off = n+c, off+int64(c)
	}
	return n, nil
}

// get returns one part.
func (f *Files) get(ctx context.Context, task string, p Part) ([]byte, error) {
	m, err := f.stream.GetLastMsgForSubject(ctx, f.subject(task, p))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, fail.New(fail.NotFound, "the cluster does not have it, or no longer")
	}
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(m.Data); int64(len(m.Data)) != p.Size || hex.EncodeToString(sum[:]) != p.SHA256 {
		return nil, fail.New(fail.Failure, "it is damaged in the cluster: %w", ErrDamaged)
	}
	return m.Data, nil
}
