package fake

import (
	"io"
	"io/fs"
	"os"

	"github.com/pkg/sftp"
)

// sftp serves the subsystem; paths are the guest's.
func (s *session) sftp() {
	f := files{s.guest}
	server := sftp.NewRequestServer(s.ch, sftp.Handlers{FileGet: f, FilePut: f, FileCmd: f, FileList: f},
		sftp.WithStartDirectory("/home/"+s.spec.User))
	if server.Serve() == nil {
		s.status(0)
	}
	_ = s.ch.Close()
}

// files presents the disk to the sftp library.
type files struct{ *guest }

func (f files) Fileread(r *sftp.Request) (io.ReaderAt, error) { return os.Open(f.path(r.Filepath)) }

func (f files) Filewrite(r *sftp.Request) (io.WriterAt, error) {
	flags, p := os.O_WRONLY, r.Pflags()
	if p.Creat {
		flags |= os.O_CREATE
	}
	if p.Trunc {
		flags |= os.O_TRUNC
	}
	if p.Excl {
		flags |= os.O_EXCL
	}
	return os.OpenFile(f.path(r.Filepath), flags, 0o644)
}

func (f files) Filecmd(r *sftp.Request) error {
	name := f.path(r.Filepath)
	switch r.Method {
	case "Setstat":
		a, set := r.Attributes(), r.AttrFlags()
		if set.Permissions {
			if err := os.Chmod(name, a.FileMode()); err != nil {
				return err
			}
		}
		if set.Size {
			if err := os.Truncate(name, int64(a.Size)); err != nil {
				return err
			}
		}
		if set.Acmodtime {
			return os.Chtimes(name, a.AccessTime(), a.ModTime())
		}
		return nil
	case "Rename":
		return os.Rename(name, f.path(r.Target))
	case "Rmdir", "Remove":
		return os.Remove(name)
	case "Mkdir":
		return os.Mkdir(name, 0o755)
	case "Symlink": // the library puts the link's name into Target and its target into Filepath
		return os.Symlink(r.Filepath, f.path(r.Target))
	}
	return sftp.ErrSSHFxOpUnsupported
}

func (f files) Filelist(r *sftp.Request) (sftp.ListerAt, error) {
	name := f.path(r.Filepath)
	switch r.Method {
	case "List":
		entries, err := os.ReadDir(name)
		if err != nil {
			return nil, err
		}
		var l list
		for _, e := range entries {
			st, err := e.Info()
			if err != nil {
				return nil, err
			}
			l = append(l, st)
		}
		return l, nil
	case "Stat":
		st, err := os.Stat(name)
		return list{st}, err
	}
	return nil, sftp.ErrSSHFxOpUnsupported
}

// Lstat makes links visible; without it the library would follow them.
func (f files) Lstat(r *sftp.Request) (sftp.ListerAt, error) {
	st, err := os.Lstat(f.path(r.Filepath))
	return list{st}, err
}

// Readlink implements sftp.ReadlinkFileLister.
func (f files) Readlink(name string) (string, error) { return os.Readlink(f.path(name)) }

type list []fs.FileInfo

func (l list) ListAt(out []fs.FileInfo, from int64) (int, error) {
	if from >= int64(len(l)) {
		return 0, io.EOF
	}
	return copy(out, l[from:]), nil
}
