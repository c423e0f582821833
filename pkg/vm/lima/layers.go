package lima

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// tidyDisks completes what a checkpoint of a VM that has ended since left undone.
func tidyDisks(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), switchPrefix):
			err = os.Rename(path, filepath.Join(dir, filenames.DiffDisk))
		case strings.HasPrefix(e.Name(), nextPrefix), strings.HasPrefix(e.Name(), newPrefix):
			err = os.Remove(path)
		case strings.HasPrefix(e.Name(), statePrefix): // of an incomplete checkpoint
			if id := strings.TrimPrefix(e.Name(), statePrefix); !exists(checkpoint{dir: dir, id: id}.path(checkpointPrefix)) && !exists(filepath.Join(dir, forkFile)) {
				err = os.Remove(path)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// replaceDisk replaces the disk of a VM that does not run by an overlay of the checkpoint's.
func (c checkpoint) replaceDisk(ctx context.Context) error {
	if err := overlay(ctx, layerPrefix+c.id, c.path(newPrefix)); err != nil {
		return err
	}
	return os.Rename(c.path(newPrefix), c.diffDisk())
}

// fileOf returns the file of a disk, by the name that it had when QEMU opened it. QEMU describes a
// disk in JSON whose backing file has another name than the one in its header.
func fileOf(disk string) string {
	text, ok := strings.CutPrefix(disk, "json:")
	if !ok {
		return disk
	}
	var options struct{ File struct{ Filename string } }
	_ = json.Unmarshal([]byte(text), &options) // otherwise the file is unknown
	return options.File.Filename
}

// discard removes a checkpoint, and the layers that no disk needs any more.
func (c checkpoint) discard() error {
	for _, prefix := range []string{checkpointPrefix, statePrefix} {
		if err := removeFile(c.path(prefix)); err != nil {
			return err
		}
	}
	return removeLayers(c.dir)
}

// discardCopy removes a checkpoint of a VM of vz. No other disk needs the checkpoint's.
func (c checkpoint) discardCopy() error {
	for _, prefix := range []string{checkpointPrefix, newPrefix, layerPrefix} {
		if err := removeFile(c.path(prefix)); err != nil {
			return err
		}
	}
	return nil
}

// removeFile removes a file. A missing one is a success.
func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeLayers removes the layers in dir that are below neither the VM's disk nor a checkpoint.
func removeLayers(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	keep := map[string]bool{}
	for _, e := range entries {
		disk := e.Name()
		if id, ok := strings.CutPrefix(disk, checkpointPrefix); ok {
			disk = layerPrefix + id
		} else if disk != filenames.DiffDisk && disk != forkFile && !strings.HasPrefix(disk, switchPrefix) && !strings.HasPrefix(disk, nextPrefix) {
			continue
		}
		if disk == forkFile {
			f, err := readFork(dir)
			if err != nil {
				return err
			}
			disk = f.Base
		}
		layers, err := layersOf(dir, disk)
		if err != nil {
			return err
		}
		for _, l := range layers {
			keep[l] = true
		}
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), layerPrefix) && !keep[e.Name()] {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// layersOf returns the layers that a disk in dir consists of, including itself if it is one.
func layersOf(dir, disk string) (layers []string, err error) {
	for range 10 * maxLayers {
		disk = filepath.Base(disk)
		switch {
		case strings.HasPrefix(disk, layerPrefix):
			layers = append(layers, disk)
		case disk == filenames.DiffDisk, strings.HasPrefix(disk, switchPrefix), strings.HasPrefix(disk, nextPrefix):
		default:
			return layers, nil
		}
		if _, disk, err = readDisk(filepath.Join(dir, disk)); err != nil {
			return nil, err
		}
	}
	return nil, fail.New(fail.Failure, "the VM's disk in %s has too many layers", dir)
}

// readDisk returns the size that a qcow2 disk has in the guest, and the file below it, from its
// header: https://www.qemu.org/docs/master/interop/qcow2.html. The library go-qcow2reader would
// open all files below it.
func readDisk(path string) (size int64, below string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, "", err
	}
	defer f.Close()
	var header struct {
		Magic       [4]byte
		_           uint32 // version
		BelowOffset uint64
		BelowSize   uint32
		_           uint32 // cluster bits
		Size        uint64
	}
	if err := binary.Read(f, binary.BigEndian, &header); err != nil || string(header.Magic[:]) != "QFI\xfb" || header.BelowSize > 1023 {
		return 0, "", errors.Join(fail.New(fail.Failure, "%s is not a qcow2 disk", path), err)
	}
	name := make([]byte, header.BelowSize)
	if _, err := f.ReadAt(name, int64(header.BelowOffset)); err != nil {
		return 0, "", fmt.Errorf("read the disk %s: %w", path, err)
	}
	return int64(header.Size), string(name), nil
}
