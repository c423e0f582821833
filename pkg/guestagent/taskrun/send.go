package taskrun

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// Send sends files of a collection from given offsets on. It reports a file that it
// cannot send completely, and continues with the next one.
func (t Attempt) Send(ctx context.Context, in io.Reader, out io.Writer) error {
	ask, err := guestproto.DecodeTaskSend(in)
	if err != nil {
		return fail.New(fail.Usage, "%w", err)
	}
	var dir string
	for _, place := range t.outPlaces() {
		if _, err := os.Lstat(filepath.Join(place, ask.Collection, outManifest)); err == nil {
			dir = filepath.Join(place, ask.Collection)
		}
	}
	if dir == "" {
		return sendFailure(out, guestproto.FailureNoCollection, errors.New("this collection no longer exists"))
	}
	list, err := readCollected(filepath.Join(dir, outManifest))
	if err != nil {
		return err
	}
	checkout, err := os.ReadFile(filepath.Join(dir, outCheckout))
	if err != nil {
		return err
	}
	own, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer own.Close()
	// The collection's own files can be sent even without the checkout.
	tree, errTree := os.OpenRoot(string(checkout))
	if errTree == nil {
		defer tree.Close()
	}
	buf := make([]byte, guestproto.MaxFrame)
	for _, item := range ask.Items {
		if item.Index < 0 || item.Index >= len(list) || list[item.Index].Skipped != "" {
			return fail.New(fail.Usage, "the collection has no file %d", item.Index)
		}
		text, err := json.Marshal(item)
		if err != nil {
			return err
		}
		if err := guestproto.WriteFrame(out, guestproto.FrameItem, text); err != nil {
			return err
		}
		a := list[item.Index]
		root, name, err := own, a.Own, error(nil)
		if a.Own == "" {
			root, name, err = tree, string(a.Path), errTree
		}
		if err == nil {
			err = sendFile(ctx, root, name, item.Offset, a.Size, out, buf)
		}
		if broken, ok := errors.AsType[*streamError](err); ok || ctx.Err() != nil {
			return errors.Join(broken, context.Cause(ctx))
		}
		if err != nil {
			err = sendFailure(out, guestproto.FailureItem, errors.New(errorWithoutPath(err)))
		} else {
			err = guestproto.WriteFrame(out, guestproto.FrameEnd, nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// streamError is an error of the output stream, not of a file.
type streamError struct{ error }

func (e *streamError) Unwrap() error { return e.error }

// sendFile sends a file from an offset up to the size that it had when it was
// collected.
func sendFile(ctx context.Context, root *os.Root, name string, offset, size int64, out io.Writer, buf []byte) error {
	f, err := openRegular(root, name)
	if err != nil {
		return err
	}
	defer f.Close()
	if offset < 0 || offset > size {
		return fmt.Errorf("it has no byte %d", offset)
	}
	for offset < size {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := f.ReadAt(buf[:min(int64(len(buf)), size-offset)], offset)
		if n == 0 && errors.Is(err, io.EOF) {
			return errors.New("it was truncated")
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if err := guestproto.WriteFrame(out, guestproto.FrameData, buf[:n]); err != nil {
			return &streamError{err}
		}
		offset += int64(n)
	}
	return nil
}

// readCollected reads a collection's manifest.
func readCollected(path string) ([]collected, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var list []collected
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var a collected
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			return nil, fmt.Errorf("read the collection: %w", err)
		}
		list = append(list, a)
	}
	return list, lines.Err()
}
