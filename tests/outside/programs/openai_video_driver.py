"""openai's client against `wan22:mini`: a video from its creation to its deletion."""

import base64
import io
import os
import warnings

import openai
import report

CLIENT = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
PROMPT, MODEL = os.environ["PROMPT"], os.environ["MODEL"]
IMAGE = base64.b64decode(os.environ["IMAGE"])
warnings.simplefilter("ignore")  # the client calls its video types deprecated


def created(**fields):
    video = CLIENT.videos.create_and_poll(model=MODEL, prompt=PROMPT, poll_interval_ms=100, **fields)
    assert video.status == "completed" and video.progress == 100, video
    return video


def a_video_is_an_mp4_file():
    content = CLIENT.videos.download_content(created().id).read()
    assert content[4:8] == b"ftyp" and len(content) > 1000


def a_thumbnail_is_a_webp_image():
    content = CLIENT.videos.download_content(created().id, variant="thumbnail").read()
    assert content[:4] == b"RIFF" and content[8:12] == b"WEBP"


def a_video_begins_with_an_image():
    image = io.BytesIO(IMAGE)
    image.name = "first.png"
    assert CLIENT.videos.download_content(created(input_reference=image).id).read()[4:8] == b"ftyp"


def the_newest_video_is_the_first_of_the_list():
    older, newer = created().id, created().id
    listed = [video.id for video in CLIENT.videos.list(limit=2)][:2]
    assert listed == [newer, older]
    assert next(video.id for video in CLIENT.videos.list(order="asc", after=older)) == newer


def a_deleted_video_is_gone():
    video = created().id
    assert CLIENT.videos.delete(video).deleted
    try:
        CLIENT.videos.retrieve(video)
    except openai.NotFoundError as error:
        assert video in str(error)
    else:
        raise AssertionError("a deleted video was found")


def a_video_of_no_size_is_refused_by_its_field():
    try:
        CLIENT.videos.create(model=MODEL, prompt=PROMPT, size="0x0")
    except openai.BadRequestError as error:
        assert error.param == "size", error
    else:
        raise AssertionError("0x0 was accepted")


async def the_asynchronous_client_does_the_same():
    client = openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
    video = await client.videos.create_and_poll(model=MODEL, prompt=PROMPT, poll_interval_ms=100)
    assert video.status == "completed"
    assert (await client.videos.download_content(video.id)).content[4:8] == b"ftyp"


report.run(
    (
        a_video_is_an_mp4_file,
        a_thumbnail_is_a_webp_image,
        a_video_begins_with_an_image,
        the_newest_video_is_the_first_of_the_list,
        a_deleted_video_is_gone,
        a_video_of_no_size_is_refused_by_its_field,
        the_asynchronous_client_does_the_same,
    )
)
