package repo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"sync"
)

// objectReader reads objects through one git process, which it starts when it is first used,
// and again if it has ended.
type objectReader struct {
	git hostGit

	mu   sync.Mutex
	cmd  *exec.Cmd
	stop context.CancelFunc
	in   io.WriteCloser
	out  *bufio.Reader
}

// Blob returns the content of a blob and its size. The content is left out if it has more than limit
// bytes.
func (t *Trees) Blob(ctx context.Context, id string, limit int64) (content string, size int64, err error) {
	if !objectID.MatchString(id) {
		return "", 0, fmt.Errorf("read file: %q must be an id", clip(id))
	}
	if ctx.Err() != nil {
		return "", 0, context.Cause(ctx)
	}
	r := &t.reader
	r.mu.Lock()
	defer r.mu.Unlock()
	if content, size, err = r.read(id, limit); err != nil {
		err = errors.Join(fmt.Errorf("read file %.12s: %w", id, err), r.end())
	}
	return content, size, err
}

func (r *objectReader) read(id string, limit int64) (string, int64, error) {
	if r.cmd == nil {
		if err := r.start(); err != nil {
			return "", 0, err
		}
	}
	size, err := r.ask("info", id)
	if err != nil || size > limit {
		return "", size, err
	}
	if size, err = r.ask("contents", id); err != nil {
		return "", 0, err
	}
	content := make([]byte, size+1) // with the newline that follows it
	if _, err := io.ReadFull(r.out, content); err != nil {
		return "", 0, err
	}
	return string(content[:size]), size, nil
}

// ask sends a command and reads the line that answers it.
func (r *objectReader) ask(command, id string) (size int64, err error) {
	if _, err := fmt.Fprintf(r.in, "%s %s\n", command, id); err != nil {
		return 0, err
	}
	line, err := r.out.ReadString('\n')
	if err != nil {
		return 0, err
	}
	// ID SP TYPE SP SIZE
	f := strings.Fields(line)
	if len(f) != 3 || f[1] != "blob" {
		return 0, fmt.Errorf("git printed %q", clip(strings.TrimSpace(line)))
	}
	return strconv.ParseInt(f[2], 10, 64)
}

func (r *objectReader) start() (err error) {
	ctx, cancel := context.WithCancel(context.Background()) // it serves many calls, and ends with close
	cmd, _, err := r.git.command(ctx, []string{"cat-file", "--batch-command"})
	if err != nil {
		cancel()
		return err
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		cancel()
		return err
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return err
	}
	r.cmd, r.stop, r.in, r.out = cmd, cancel, in, bufio.NewReaderSize(out, 64<<10)
	return nil
}

// end ends the process. The next read starts another one.
func (r *objectReader) end() error {
	if r.cmd == nil {
		return nil
	}
	_ = r.in.Close() // it may have ended already
	r.stop()
	_ = r.cmd.Wait() // it was killed
	r.cmd = nil
	return nil
}

func (r *objectReader) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.end()
}
