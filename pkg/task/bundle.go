package task

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
)

// writeBundle packs outbox into one file. It leaves out files that are only partly
// received.
func (d Dir) writeBundle() (err error) {
	part := d.path(".bundle.part") // always the same name, so leftovers of a crash are replaced
	f, err := os.OpenFile(part, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return d.trouble("write task bundle: %w", err)
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err == nil {
			crash.Here(crash.BeforeFile)
			err = os.Rename(part, d.Bundle())
			crash.Here(crash.AfterFile)
		}
		if err != nil {
			err = d.trouble("write task bundle: %w", errors.Join(err, os.Remove(part)))
		}
	}()
	// Artifacts are often compressed already, and may be gigabytes: speed matters
	// more than size.
	z, err := gzip.NewWriterLevel(f, gzip.BestSpeed)
	if err != nil {
		return err
	}
	t := tar.NewWriter(z)
	root, err := os.OpenRoot(d.path("outbox"))
	if err != nil {
		return err
	}
	defer root.Close()
	err = fs.WalkDir(root.FS(), ".", func(name string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && name == filepath.ToSlash(filepath.Join("artifacts", partDir)):
			return fs.SkipDir
		case !e.Type().IsRegular():
			return nil // files imply their directories; no other types occur
		}
		return pack(t, root, name)
	})
	return errors.Join(err, t.Close(), z.Close(), f.Sync())
}

func pack(t *tar.Writer, root *os.Root, name string) error {
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	h := &tar.Header{Name: name, Mode: 0o644, Size: st.Size(), ModTime: st.ModTime(), Format: tar.FormatPAX}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.CopyN(t, f, st.Size()) // a log may grow meanwhile
	return err
}

// partDir is where artifacts are received, below the directory of the complete ones.
const partDir = ".part"
