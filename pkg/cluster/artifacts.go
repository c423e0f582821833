package cluster

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// partSize is the size of all parts of a file but the last, in bytes. After an interruption, parts
// that are stored are not sent again.
const partSize = 8 << 20

const bucket = "ARTIFACTS"

// Part is a piece of a file.
type Part struct {
	SHA256 string `json:"sha256"` // hex
	Size   int64  `json:"size"`   // bytes
}

// Files are the artifacts and logs of tasks, in JetStream's object store. Parts have the name
// TASK/SHA256.
type Files struct{ store jetstream.ObjectStore }

// OpenFiles opens the store of files, and creates it on that many cores if it does not exist. Files
// disappear after keep.
func OpenFiles(ctx context.Context, js jetstream.JetStream, replicas int, size int64, keep time.Duration) (*Files, error) {
	s, err := js.ObjectStore(ctx, bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		s, err = js.CreateObjectStore(ctx, jetstream.ObjectStoreConfig{
			Bucket: bucket, TTL: keep, MaxBytes: size, Storage: jetstream.FileStorage, Replicas: replicas,
			Placement: &jetstream.Placement{Tags: []string{coreTag}},
		})
	}
	if err != nil {
		return nil, fmt.Errorf("open the cluster's files: %w", err)
	}
	return &Files{s}, nil
}

// Put stores a file of a task and returns its parts, which Get needs. If it is interrupted, the
// next Put sends only what is missing.
func (f *Files) Put(ctx context.Context, task string, r io.Reader) ([]Part, error) {
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
		sum := sha256.Sum256(buf[:n])
		p := Part{hex.EncodeToString(sum[:]), int64(n)}
		if err := f.put(ctx, task, p, buf[:n]); err != nil {
			return parts, fmt.Errorf("store part %d of a file of task %s: %w", len(parts)+1, task, err)
		}
		parts = append(parts, p)
		if n < partSize {
			return parts, nil
		}
	}
}

func (f *Files) put(ctx context.Context, task string, p Part, data []byte) error {
	name := task + "/" + p.SHA256
	info, err := f.store.GetInfo(ctx, name)
	if err == nil && info.Size == uint64(p.Size) {
		return nil
	}
	if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return err
	}
	_, err = f.store.Put(ctx, jetstream.ObjectMeta{Name: name}, bytes.NewReader(data))
	return err
}

// Get writes a file of a task to w, from a number of bytes on that w has already. All bytes that it
// writes have the digest of their part.
func (f *Files) Get(ctx context.Context, task string, parts []Part, from int64, w io.Writer) error {
	for i, p := range parts {
		if p.Size < 0 || p.Size > partSize {
			return fail.New(fail.Failure, "read a file of task %s: part %d has an invalid size", task, i+1)
		}
		if from >= p.Size {
			from -= p.Size
			continue
		}
		data, err := f.get(ctx, task, p)
		if err == nil {
			_, err = w.Write(data[from:])
		}
		if err != nil {
			return fmt.Errorf("read part %d of %d of a file of task %s: %w", i+1, len(parts), task, err)
		}
		from = 0
	}
	return nil
}

func (f *Files) get(ctx context.Context, task string, p Part) ([]byte, error) {
	o, err := f.store.Get(ctx, task+"/"+p.SHA256)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil, fail.New(fail.NotFound, "it was removed")
	}
	if err != nil {
		return nil, err
	}
	defer o.Close()
	data, err := io.ReadAll(io.LimitReader(o, p.Size+1))
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(data); int64(len(data)) != p.Size || hex.EncodeToString(sum[:]) != p.SHA256 {
		return nil, fail.New(fail.Failure, "it is damaged")
	}
	return data, nil
}
