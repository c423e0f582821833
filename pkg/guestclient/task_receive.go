package guestclient

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const (
	// partDir holds files in transit, named by their checksums. Each holds the
	// beginning of a file with that checksum, or garbage.
	partDir = ".part"

	// fewFiles is how many files are flushed to the disk one by one; more are flushed
	// all at once.
	fewFiles = 256
)

// Receive transfers the files of a collection into a directory. Each file appears under
// its name only when it is complete and its checksum is correct. Receive skips files
// that are already there and resumes partial ones. After an error it may be called
// again, with the same collection or another one. It returns the collection's list, in
// which files that the guest can no longer send as they were collected are marked as
// Skipped.
func (t Task) Receive(ctx context.Context, into *os.Root, c guestproto.Collection) ([]guestproto.Artifact, error) {
	list, err := t.receive(ctx, into, c)
	if err != nil {
		return nil, fmt.Errorf("receive the artifacts: %w", err)
	}
	return list, nil
}

func (t Task) receive(ctx context.Context, into *os.Root, c guestproto.Collection) ([]guestproto.Artifact, error) {
	r := &receiver{into: into, list: slices.Clone(c.Artifacts), twice: map[int]bool{}}
	err := into.MkdirAll(partDir, 0o700)
	if err == nil {
		err = errors.Join(r.prune(t.ID), r.pruneParts())
	}
	if err != nil {
		return nil, fail.New(fail.Host, "%w", err)
	}
	var missing []int
	for i, a := range r.list {
		if a.Skipped != "" {
			continue
		}
		if err := guestproto.CheckArtifactName(a.Name); err != nil {
			return nil, err
		}
		if !r.isComplete(ctx, a) {
			missing = append(missing, i)
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
	r.flush = len(missing) <= fewFiles
	// Retry the files that were resumed and came out wrong: the part that was already
	// here may have been wrong.
	for len(missing) > 0 {
		if err := t.fetch(ctx, r, c.ID, missing); err != nil {
			return nil, err
		}
		missing, r.again = r.again, nil
	}
	if err := into.RemoveAll(partDir); err != nil {
		return nil, fail.New(fail.Host, "%w", err)
	}
	if err := r.flushed(); err != nil {
		return nil, fail.New(fail.Host, "flush the artifacts to the disk: %w", err)
	}
	return r.list, nil
}

// fetch asks the guest for files, or for the missing parts of them.
func (t Task) fetch(ctx context.Context, r *receiver, collection string, files []int) error {
	ask := guestproto.TaskSend{Collection: collection}
	parts := map[string]bool{} // of two files with the same content, only the first has a partial file
	for _, i := range files {
		item := guestproto.SendItem{Index: i}
		if sum := r.list[i].SHA256; !parts[sum] {
			parts[sum] = true
			item.Offset = r.partSize(r.list[i])
		}
		ask.Items = append(ask.Items, item)
	}
	var text bytes.Buffer
	if err := ask.Encode(&text); err != nil {
		return err
	}
	r.expect = ask.Items
	err := t.frames(ctx, t.command("send"), &text, r.frame)
	half := r.part != nil
	if half {
		err = errors.Join(err, r.part.Close())
		r.part = nil
	}
	if err == nil && (half || len(r.expect) > 0) {
		err = errEnded
	}
	return err
}

// receiver receives files one after the other.
type receiver struct {
	into  *os.Root
	list  []guestproto.Artifact
	flush bool // each file

	expect []guestproto.SendItem // files to come
	again  []int                 // files to request again
	twice  map[int]bool          // files that were requested again
	part   *os.File              // of the file in transit, nil if there is none
	item   guestproto.SendItem
	sum    hash.Hash
	at     int64
	dirs   []string // directories with received files
}

func partName(a guestproto.Artifact) string { return partDir + "/" + a.SHA256 }

// prune removes existing files that belong to another collection.
func (r *receiver) prune(id string) error {
	files, dirs := map[string]bool{}, map[string]bool{}
	for _, a := range r.list {
		if a.Skipped == "" {
			files[a.Name] = true
			for dir := path.Dir(a.Name); dir != "." && !dirs[dir]; dir = path.Dir(dir) {
				dirs[dir] = true
			}
		}
	}
	for _, top := range []string{guestproto.PatchName(id), guestproto.UntrackedName(id), guestproto.UntrackedDir, guestproto.FilesDir, guestproto.SubmodulesDir} {
		err := fs.WalkDir(r.into.FS(), top, func(name string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || e.IsDir() && dirs[name] || !e.IsDir() && files[name] {
				return err
			}
			if err := r.into.RemoveAll(name); err != nil || !e.IsDir() {
				return err
			}
			return fs.SkipDir
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// pruneParts removes partial files that the collection does not list. Otherwise a guest
// that announces other files each time would fill the disk with them.
func (r *receiver) pruneParts() error {
	parts, err := fs.ReadDir(r.into.FS(), partDir)
	if err != nil {
		return err
	}
	listed := map[string]bool{}
	for _, a := range r.list {
		listed[a.SHA256] = a.Skipped == ""
	}
	for _, e := range parts {
		if !listed[e.Name()] {
			if err := r.into.RemoveAll(partDir + "/" + e.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

// isComplete reports whether a file is already there with the right content.
func (r *receiver) isComplete(ctx context.Context, a guestproto.Artifact) bool {
	info, err := r.into.Lstat(a.Name)
	if err != nil || !info.Mode().IsRegular() || info.Size() != a.Size {
		return false
	}
	f, err := r.into.Open(a.Name)
	if err != nil {
		return false
	}
	defer f.Close()
	sum := sha256.New()
	buf := make([]byte, guestproto.MaxFrame)
	for ctx.Err() == nil {
		n, err := f.Read(buf)
		sum.Write(buf[:n])
		if errors.Is(err, io.EOF) {
			return hex.EncodeToString(sum.Sum(nil)) == a.SHA256
		}
		if err != nil {
			return false
		}
	}
	return false
}

// partSize returns how many bytes of a file are already there.
func (r *receiver) partSize(a guestproto.Artifact) int64 {
	info, err := r.into.Lstat(partName(a))
	if err != nil || !info.Mode().IsRegular() || info.Size() > a.Size {
		return 0
	}
	return info.Size()
}

func (r *receiver) frame(f guestproto.Frame) error {
	if r.part == nil {
		if f.Kind != guestproto.FrameItem {
			return unexpected(f)
		}
		var item guestproto.SendItem
		if err := json.Unmarshal(f.Data, &item); err != nil || len(r.expect) == 0 || item != r.expect[0] {
			return errors.New("the guest sent an unexpected file")
		}
		r.item, r.expect = item, r.expect[1:]
		return r.openPart()
	}
	a := &r.list[r.item.Index]
	switch f.Kind {
	case guestproto.FrameData:
		if len(f.Data) == 0 || int64(len(f.Data)) > a.Size-r.at {
			return fmt.Errorf("the guest sent too many bytes of %q", guestproto.Clean(a.Name))
		}
		return r.write(f.Data)
	case guestproto.FrameEnd:
		return r.publish(a)
	case guestproto.FrameFailure:
		failure, err := guestproto.DecodeFailure(f.Data)
		if err != nil || failure.Kind != guestproto.FailureItem {
			return unexpected(f)
		}
		return r.skip(a, failure.Text)
	}
	return unexpected(f)
}

// openPart opens the next file and hashes the part of it that is already there.
func (r *receiver) openPart() error {
	a := r.list[r.item.Index]
	part, err := r.into.OpenFile(partName(a), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fail.New(fail.Host, "%w", err)
	}
	r.part, r.sum, r.at = part, sha256.New(), r.item.Offset
	err = part.Truncate(r.at)
	if err == nil {
		_, err = io.CopyBuffer(struct{ io.Writer }{r.sum}, struct{ io.Reader }{io.NewSectionReader(part, 0, r.at)}, make([]byte, guestproto.MaxFrame))
	}
	if err != nil {
		return fail.New(fail.Host, "%w", err)
	}
	return nil
}

// zeros is compared with data to preserve holes in sparse files.
var zeros [guestproto.MaxFrame]byte

func (r *receiver) write(p []byte) error {
	r.sum.Write(p)
	var err error
	if bytes.Equal(p, zeros[:len(p)]) {
		err = r.part.Truncate(r.at + int64(len(p)))
	} else {
		_, err = r.part.WriteAt(p, r.at)
	}
	if err != nil {
		return fail.New(fail.Host, "%w", err)
	}
	r.at += int64(len(p))
	return nil
}

// publish moves a complete file to its name.
func (r *receiver) publish(a *guestproto.Artifact) error {
	if r.at != a.Size {
		return fmt.Errorf("the guest sent %d of %d bytes of %q", r.at, a.Size, guestproto.Clean(a.Name))
	}
	if hex.EncodeToString(r.sum.Sum(nil)) != a.SHA256 {
		if r.item.Offset > 0 && !r.twice[r.item.Index] {
			r.twice[r.item.Index] = true
			r.again = append(r.again, r.item.Index)
			return r.removePart(*a)
		}
		return r.skip(a, "it changed during the transfer")
	}
	mode := fs.FileMode(0o600)
	if a.Executable {
		mode = 0o700
	}
	err := r.part.Chmod(mode)
	if r.flush {
		err = errors.Join(err, r.part.Sync())
	}
	err = errors.Join(err, r.part.Close())
	r.part = nil
	if err != nil {
		return fail.New(fail.Host, "%w", err)
	}
	dir := path.Dir(a.Name)
	if err := r.into.MkdirAll(dir, 0o700); err != nil {
		return r.classifyWriteError(a, err)
	}
	crash.Here(crash.BeforeFile)
	if err := r.into.Rename(partName(*a), a.Name); err != nil {
		return r.classifyWriteError(a, err)
	}
	crash.Here(crash.AfterFile)
	if r.flush && !slices.Contains(r.dirs, dir) {
		r.dirs = append(r.dirs, dir)
	}
	return nil
}

// classifyWriteError distinguishes a failing disk from a guest that lists files below files.
func (r *receiver) classifyWriteError(a *guestproto.Artifact, err error) error {
	for name := a.Name; name != "."; name = path.Dir(name) {
		if info, errStat := r.into.Lstat(name); errStat == nil && info.IsDir() == (name == a.Name) {
			return r.skip(a, "another artifact has this path or is a parent of it")
		}
	}
	return fail.New(fail.Host, "%w", err)
}

// skip marks a file as skipped.
func (r *receiver) skip(a *guestproto.Artifact, why string) error {
	err := r.removePart(*a)
	*a = guestproto.Artifact{Name: a.Name, Size: a.Size, Skipped: why}
	return err
}

// removePart removes the part of a file that was received.
func (r *receiver) removePart(a guestproto.Artifact) error {
	var err error
	if r.part != nil {
		err = r.part.Close()
		r.part = nil
	}
	if errRemove := r.into.Remove(partName(a)); !errors.Is(errRemove, fs.ErrNotExist) {
		err = errors.Join(err, errRemove)
	}
	if err != nil {
		return fail.New(fail.Host, "%w", err)
	}
	return nil
}

// flushed flushes everything that was received, so that it survives a power cut.
func (r *receiver) flushed() error {
	if !r.flush {
		return syncAll(r.into)
	}
	// A new directory is an entry in its parent, which must be flushed as well.
	for _, dir := range r.dirs {
		for ; !slices.Contains(r.dirs, path.Dir(dir)); dir = path.Dir(dir) {
			r.dirs = append(r.dirs, path.Dir(dir))
		}
	}
	for _, dir := range append(r.dirs, ".") {
		d, err := r.into.Open(dir)
		if err != nil {
			return err
		}
		if err := errors.Join(d.Sync(), d.Close()); err != nil {
			return err
		}
	}
	return nil
}
