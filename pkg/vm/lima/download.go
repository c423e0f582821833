package lima

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lima-vm/lima/pkg/downloader"
	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	maxDownload   = 64 << 30        // bytes; prevents a server from filling the disk
	downloadStall = time.Minute     // time without a byte until the connection is given up
	downloadTries = 5               // consecutive tries without any data
	downloadPause = 2 * time.Second // between tries
	downloadQuiet = 5 * time.Second // time without a byte until that is reported
	downloadSay   = time.Second
)

// download copies the image at a URL to dest, through the cache.
func (c imageCache) download(ctx context.Context, f limayaml.File, dest string, p vm.Progress) error {
	dl := download{
		url: f.Location, digest: f.Digest, say: p, stall: downloadStall, quiet: downloadQuiet, pause: downloadPause,
		dir: c.entry(f.Location),
	}
	data, err := dl.run(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("download the image: %w", explainOS(err))
	}
	return catchFatal("copy the image", func() error {
		_, err := downloader.Download(ctx, dest, data, downloader.WithDecompress(true))
		return err
	})
}

// entry returns where the cache has the file of a URL. It is the place that Lima uses.
func (c imageCache) entry(url string) string {
	return filepath.Join(c.dir, "download", "by-url-sha256", downloader.CacheKey(url))
}

// download fetches one file into the cache. Data that arrived before an interruption
// stays there, and the next try requests the rest.
type download struct {
	url    string
	digest digest.Digest
	dir    string
	say    vm.Progress
	stall  time.Duration
	quiet  time.Duration
	pause  time.Duration
}

func (dl download) file(name string) string { return filepath.Join(dl.dir, name) }

// run returns the path of the complete file. One caller downloads, the others wait
// for its result.
func (dl download) run(ctx context.Context) (data string, err error) {
	if err := os.MkdirAll(dl.dir, 0o700); err != nil {
		return "", err
	}
	lock, err := dl.lock(ctx)
	if err != nil {
		return "", err
	}
	defer lock.Unlock()
	data = dl.file("data")
	known := dl.file(dl.digest.Algorithm().String() + ".digest")
	if b, err := os.ReadFile(known); err == nil && strings.TrimSpace(string(b)) == dl.digest.String() {
		if _, err := os.Stat(data); err == nil {
			return data, nil
		}
	}
	// Other files here belong to another digest, or to a process that died.
	part := dl.file("part-" + dl.digest.Encoded())
	old, err := filepath.Glob(dl.file("part-*"))
	if err != nil {
		return "", err
	}
	for _, other := range append(old, known, data) {
		if other != part {
			err = errors.Join(err, remove(other))
		}
	}
	if err != nil {
		return "", err
	}
	if err := dl.fetch(ctx, part); err != nil {
		return "", err
	}
	if err := dl.check(ctx, part); err != nil {
		return "", err
	}
	if err := os.Rename(part, data); err != nil {
		return "", err
	}
	return data, atomicfile.Write(known, []byte(dl.digest.String()), 0o600)
}

func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// lock waits until no other process downloads the URL.
func (dl download) lock(ctx context.Context) (*lockfile.Lock, error) {
	return lockfile.Wait(ctx, dl.file("lock"), func() { report(dl.say, "another process is downloading %s, waiting for it", dl.url) })
}

// errFinal marks errors that another try would not change.
type errFinal struct{ error }

func (e errFinal) Unwrap() error { return e.error }

// fetch downloads the whole URL into part. It repeats as long as tries bring data.
func (dl download) fetch(ctx context.Context, part string) (err error) {
	f, err := os.OpenFile(part, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	defer func() { // a refused download leaves no empty part
		if st, serr := f.Stat(); err != nil && serr == nil && st.Size() == 0 {
			err = errors.Join(err, remove(part))
		}
	}()
	for failed := 0; ; {
		before, err := f.Seek(0, io.SeekEnd)
		if err != nil {
			return err
		}
		err = dl.fetchOnce(ctx, f, before)
		if err == nil {
			return f.Sync()
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if final, ok := errors.AsType[errFinal](err); ok {
			return final.error
		}
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
			return errors.Join(err, remove(part)) // otherwise the disk stays full
		}
		after, serr := f.Seek(0, io.SeekEnd)
		if serr != nil {
			return serr
		}
		if failed++; after > before {
			failed = 0
		}
		if failed >= downloadTries {
			return fail.New(fail.Host, "%s: %w; %d MB are kept, and the next attempt continues from there", dl.url, err, after/1e6)
		}
		report(dl.say, "downloading %s: %v; trying again", filepath.Base(dl.url), err)
		if err := sleep(ctx, dl.pause); err != nil {
			return err
		}
	}
}

// fetchOnce requests what part lacks after its first have bytes.
func (dl download) fetchOnce(ctx context.Context, part *os.File, have int64) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(dl.stall, func() { cancel(fmt.Errorf("no data for %v", dl.stall)) })
	defer watch.Stop()
	var saying sync.Mutex // keeps the timer's report from overlapping the reader's, or outliving the try
	over := false
	say := func(format string, args ...any) {
		saying.Lock()
		defer saying.Unlock()
		if !over {
			report(dl.say, "downloading %s: "+format, append([]any{filepath.Base(dl.url)}, args...)...)
		}
	}
	quiet := time.AfterFunc(dl.quiet, func() { say("stalled, no data for %v; retrying after %v", dl.quiet, dl.stall) })
	defer func() {
		quiet.Stop()
		saying.Lock()
		defer saying.Unlock()
		over = true
	}()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, dl.url, nil)
	if err != nil {
		return errFinal{err}
	}
	req.Header.Set("Accept-Encoding", "identity") // the digest is that of the file as stored on the server
	if have > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", have))
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return because(ctx, err)
	}
	defer resp.Body.Close()
	switch code := resp.StatusCode; {
	case code == http.StatusPartialContent && strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", have)):
	case code == http.StatusOK && have > 0:
		if err := part.Truncate(0); err != nil {
			return errFinal{err}
		}
		have = 0
	case code == http.StatusOK:
	case code == http.StatusRequestedRangeNotSatisfiable && have > 0:
		if whole := resp.Header.Get("Content-Range"); whole == fmt.Sprintf("bytes */%d", have) {
			return nil // it was complete already
		}
		return errors.Join(errors.New("the server's file has changed"), part.Truncate(0))
	case code >= 500 || code == http.StatusTooManyRequests || code == http.StatusRequestTimeout:
		return fmt.Errorf("the server responded %s", resp.Status)
	default:
		return errFinal{fail.New(fail.NotFound, "%s: the server responded %s", dl.url, resp.Status).WithHint("agent-sessionizer config edit # or pass another --image")}
	}
	if err := dl.checkSpace(resp.ContentLength); err != nil {
		return err
	}
	watched := &watchedReader{from: resp.Body, total: have, whole: have + resp.ContentLength, say: say, seen: func() {
		watch.Reset(dl.stall)
		quiet.Reset(dl.quiet)
	}}
	n, err := io.Copy(part, io.LimitReader(watched, maxDownload-have+1))
	switch {
	case err != nil:
		return because(ctx, err)
	case have+n > maxDownload:
		return errFinal{errors.Join(fail.New(fail.Usage, "%s is larger than %d GiB", dl.url, maxDownload>>30), part.Truncate(0))}
	}
	return nil
}

// because returns why a request ended: the cause of ctx's end, if ctx has ended.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// checkSpace fails immediately for a file that would not fit on the disk.
func (dl download) checkSpace(need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dl.dir, &st); err != nil {
		return errFinal{err}
	}
	free := int64(st.Bavail) * int64(st.Bsize) //nolint:unconvert // not int64 on darwin
	if need > free {
		return errFinal{fmt.Errorf("%s has %d MB, and %d MB are free in %s: %w", dl.url, need/1e6, free/1e6, dl.dir, syscall.ENOSPC)}
	}
	return nil
}

// watchedReader reports that bytes arrive, and how many.
type watchedReader struct {
	from         io.Reader
	seen         func()
	total, whole int64
	say          func(format string, args ...any)
	reportedAt   time.Time
}

func (w *watchedReader) Read(b []byte) (int, error) {
	n, err := w.from.Read(b)
	if n > 0 {
		w.seen()
	}
	if w.total += int64(n); time.Since(w.reportedAt) >= downloadSay {
		w.reportedAt = time.Now()
		of := ""
		if w.whole >= w.total {
			of = " of " + strconv.FormatInt(w.whole/1e6, 10)
		}
		w.say("%d%s MB", w.total/1e6, of)
	}
	return n, err
}

// check compares the received file with the digest, and deletes it if they differ.
func (dl download) check(ctx context.Context, part string) error {
	f, err := os.Open(part)
	if err != nil {
		return err
	}
	defer f.Close()
	report(dl.say, "checking %s", filepath.Base(dl.url))
	h := dl.digest.Algorithm().Digester()
	for {
		_, err := io.CopyN(h.Hash(), f, 64<<20)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if got := h.Digest(); got != dl.digest {
		return errors.Join(fail.New(fail.Failure, "%s has the digest %s, must be %s", dl.url, got, dl.digest).
			WithHint("agent-sessionizer config edit # or pass --image with the publisher's digest"), remove(part))
	}
	return nil
}
